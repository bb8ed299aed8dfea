"""What the sections of methods have in common. An objective's has `trained_steps`, and is named like it."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import FiniteFloat

from diffrl.config.base import Problem, Sampling, Section, Share, key

AdvantageStd = Literal["group", "sample", "batch", "none"]
ADVANTAGE_STD = "A = R - group mean is divided by the std of the group (sample: with n - 1), of the epoch's batch, or 1"
TIMESTEP_FRACTION = "train only this share of the schedule's timesteps, the noisiest, which decide the composition"


class Decay(Section):
    """d(step) = 0 before `start`, then min(value + slope * (step - start), cap)."""

    start: int = key(0, "the decay is 0 before this optimiser step", "optimiser steps", ge=0)
    value: Share = key(0.0, "decay at start; 0 copies the trained weights")
    slope: FiniteFloat = key(0.001, "growth of the decay", "per optimiser step", ge=0)
    cap: Share = key(0.5, "largest decay")

    def __call__(self, step: int) -> float:
        return 0.0 if step < self.start else min(self.value + self.slope * (step - self.start), self.cap)


def noisiest(steps: int, fraction: float) -> int:
    """How many of a schedule's `steps` timesteps a fraction of it is, at least one."""
    return max(math.ceil(steps * fraction - 1e-9), 1)


def check_timesteps(name: str, section: Any, rollout: Sampling) -> None:
    """The section `name` trains no more timesteps without repeats than there are, and says what a fraction is of."""
    sampling = getattr(section, "timestep_sampling", "schedule")
    if sampling == "schedule":
        levels = noisiest(rollout.steps, section.timestep_fraction)
        if (section.timesteps or 0) > levels:
            fraction = f" x {name}.timestep_fraction" if section.timestep_fraction < 1 else ""
            text = f"{section.timesteps} timesteps, but the schedule has only {levels} (rollout.steps{fraction})"
            raise Problem(f"{name}.timesteps", text)
    elif section.timestep_fraction < 1:
        text = f'is a share of the schedule\'s timesteps, but {name}.timestep_sampling is "{sampling}"'
        raise Problem(f"{name}.timestep_fraction", text)


class ForwardProcess(Section):
    """What DiffusionNFT and CRD share: images are noised again, at timesteps of the sampling schedule."""

    timesteps: int | None = key(None, "trained timesteps per image; null: rollout.steps", "timesteps", ge=1)
    timestep_fraction: FiniteFloat = key(1.0, TIMESTEP_FRACTION, gt=0, le=1)

    def trained_steps(self, rollout: Sampling) -> int:
        return self.timesteps or noisiest(rollout.steps, self.timestep_fraction)
