"""What the sections of methods have in common. An objective's has `trained_steps`, and is named like it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from diffrl.config.base import Sampling, Section, key
from diffrl.keys import MOST

AdvantageStd = Literal["group", "sample", "batch", "none"]
ADVANTAGE_STD = "A = R - group mean is divided by the std of the group (sample: with n - 1), of the epoch's batch, or 1"


class Decay(NamedTuple):
    """d(step) = 0 before `start`, then min(value + slope * (step - start), cap): how a snapshot follows theta.

    `start` in optimiser steps, `slope` per optimiser step; `value` and `cap` in [0, 1).
    """

    start: int = 0
    value: float = 0.0
    slope: float = 0.001
    cap: float = 0.5

    def __call__(self, step: int) -> float:
        return 0.0 if step < self.start else min(self.value + self.slope * (step - self.start), self.cap)


def _timesteps(value: Any) -> int | float | list[int | float] | None:
    """How many timesteps; a share of the schedule's, the noisiest; or [how many, of which share]."""
    most = MOST["timesteps"]
    count, share = value if isinstance(value, list | tuple) and len(value) == 2 else (value, 0.5)
    count, share = (1, count) if type(count) is float else (count, share)
    if value is not None and not (type(count) is int and 1 <= count <= most and type(share) is float and 0 < share < 1):
        text = f"a whole number from 1 to {most}, a share between 0 and 1, [number, share], or null"
        raise PydanticCustomError("timesteps", text)  # type: ignore[arg-type]
    return list(value) if isinstance(value, list | tuple) else value  # type: ignore[no-any-return]


def asked(timesteps: Any) -> tuple[int | None, float]:
    """(how many, of which noisiest share of the schedule's) of a section's `timesteps`; None: all of these."""
    either = (None, timesteps) if isinstance(timesteps, float) else (timesteps, 1.0)
    return (timesteps[0], timesteps[1]) if isinstance(timesteps, list) else either


def advantage_std(config: Any) -> tuple[str, str]:
    """What divides the advantages ("" without any), and the key that says so: of the objective, or of what is around
    it, such as GARDO."""
    for section in reversed(config.sections):
        if getattr(section, "advantage_std", None) is not None:
            return section.advantage_std, f"{section.method.name}.advantage_std"
    return "", f"{config.method.name}.advantage_std"


Timesteps = Annotated[int | float | list[int | float] | None, PlainValidator(_timesteps)]


def noisiest(steps: int, fraction: float) -> int:
    """How many of a schedule's `steps` timesteps a fraction of it is, at least one."""
    return max(math.ceil(steps * fraction - 1e-9), 1)


class ForwardProcess(Section):
    """What DiffusionNFT and CRD share: images are noised again, at timesteps of the sampling schedule."""

    timesteps: Timesteps = key(
        None,
        "trained timesteps per image: how many; a share of the schedule's (0.34), the noisiest, which decide the "
        "composition; or [6, 0.5], so many of such a share; null: rollout.steps",
        "timesteps",
    )

    def trained_steps(self, rollout: Sampling) -> int:
        count, share = asked(self.timesteps)
        return count or noisiest(rollout.steps, share)
