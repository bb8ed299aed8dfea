"""GARDO: a penalty for images whose rewards are not to be trusted, and diversity in the advantages."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import FiniteFloat, PlainValidator
from pydantic_core import PydanticCustomError

from diffrl.config.base import NO_ROLLOUT, Method, Problem, Section, key, section
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd
from diffrl.errors import nearest

if TYPE_CHECKING:
    from diffrl.config import Config

# KL at which GARDO's reference is renewed: the paper's for GRPO (7 times as much by the exact KL, whose mean over a
# schedule of 10 steps is that much larger), and where the authors' NFT script starts for distances of velocities.
AUTO_RESET = {"published": 1e-4, "exact": 7e-4, "velocity": 0.15}


def _threshold(value: Any) -> float | str | None:
    if value is None or value == "auto":
        return value
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise PydanticCustomError("threshold", 'a number above 0, "auto" or null')
    return float(value)


# One validator for all three kinds: pydantic's own would report each of them.
Threshold = Annotated[float | Literal["auto"] | None, PlainValidator(_threshold)]


class Reset(Section):
    kl: Threshold = key(
        "auto",
        "theta becomes the reference after a step whose penalised rows lie farther from it; null: never; auto: for "
        "grpo 1e-4 with the published kl, 7e-4 with the exact one; 0.15 for the others",
        "the penalty over beta: KL of a step (grpo), else mean squared difference of velocities",
    )
    steps: int | None = key(100, "and so many steps after it last did; null: never", "optimiser steps", ge=1)


class GardoSection(Section):
    method = Method(
        "gardo",
        "GARDO",
        {"GARDO": "2512.24138"},
        about="a gated, adaptive penalty around the objective",
        kind="wrapper",
        trainer="diffrl.methods.gardo.penalty:Gardo",
        state=True,
    )
    auxiliary: list[str] = key(
        [], "names under watch that the optimised score is compared with, scored on training images, too; not optimised"
    )
    beta: FiniteFloat | None = key(
        0.04, "weight of the penalised rows' KL, in place of the objective's own beta; null: the objective's", ge=0
    )
    normalise: Literal["rows", "gated"] = key(
        "rows", "the KL is averaged over all rows of a step (paper) or over its penalised ones (authors' code)"
    )
    advantage_std: AdvantageStd | None = key("none", f"{ADVANTAGE_STD}; null: as the objective does")
    diversity: Literal["off", "raw", "group_mean"] = key(
        "group_mean",
        "positive advantages times the distance to the nearest image of the group (evaluate.features): as it is "
        "(paper), or over its group mean (authors' code)",
    )
    gate: Literal["batch", "group", "all"] = key(
        "batch",
        "who is penalised: the share with the highest U of the epoch's samples with U >= 0 (authors' code), of each "
        "group (paper), or all: no gate",
    )
    share: FiniteFloat = key(
        0.1, "share of samples that is penalised at first; it moves between a fifth and twice of it", gt=0, le=1
    )
    reset: Reset = section(Reset, "when the trained weights become the reference")

    def around(self, objective: Any, config: Any, lower: Collection[str]) -> None:
        from diffrl.methods.gardo.penalty import Gardo

        Gardo.of(self, objective, config, lower)

    def build(self, build: Any) -> None:
        if self.auxiliary:
            from diffrl.methods.gardo.gallery import Gallery

            build.add(Gallery(build, build.objective.penalty))

    def reset_kl(self, config: Config) -> float | None:
        """reset.kl, with "auto" in the units of the objective's KL."""
        if self.reset.kl != "auto":
            return self.reset.kl
        base: Any = config.objective_section
        return AUTO_RESET[getattr(base, "kl", "velocity")]

    def check(self, config: Config) -> None:
        objective = config.method.name
        if config.image_set is not None:
            raise Problem("gardo", NO_ROLLOUT)
        base: Any = config.objective_section
        beta = getattr(base, "beta", None)
        if beta is None:
            raise Problem("gardo", f'objective "{objective}" has no KL penalty that could be gated')
        default = getattr(type(base).model_fields.get("beta"), "default", 0)
        if self.beta is not None and beta not in (0, default, self.beta):
            text = f"{beta:g}, but gardo.beta {self.beta:g} takes its place; set gardo.beta (null: {objective}.beta)"
            raise Problem(f"{objective}.beta", text)
        if config.method.advantages != "any" and self.diversity != "off":
            has = "has none" if config.method.advantages == "none" else "ranks or weighs a group by itself"
            text = f'{self.diversity} shapes advantages, but objective "{objective}" {has}: set it to off'
            raise Problem("gardo.diversity", text)
        if self.gate != "all" and not self.auxiliary:
            known = ", ".join(config.watch) or "nothing yet"
            raise Problem("gardo.auxiliary", f"empty; name at least one reward that is under watch (there is: {known})")
        for name in self.auxiliary:
            self._check_auxiliary(name, config)

    def _check_auxiliary(self, name: str, config: Config) -> None:
        where = "gardo.auxiliary"
        if self.auxiliary.count(name) > 1:
            raise Problem(where, f'"{name}" is named twice')
        if name in config.rewards:
            text = f'"{name}" is in rewards; an optimised reward cannot judge itself: name one under watch'
            raise Problem(where, text)
        if name not in config.watch:
            raise Problem(where, f'"{name}" is not under watch{nearest(name, config.watch)}')
        entry = config.watch[name]
        for other, reward in config.rewards.items():
            same = (reward.plugin or other, reward.arguments, reward.column)
            if same == (entry.plugin or name, entry.arguments, entry.column):
                raise Problem(where, f'"{name}" is the optimised reward "{other}" by another name')
