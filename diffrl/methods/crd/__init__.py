"""CRD: centered reward distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import FiniteFloat

from diffrl.config.base import AS_IS, LARGEST, Method, key, one_or_two
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd, Decay, ForwardProcess
from diffrl.methods.shared.sections import FOLLOWS, Schedule, check_timesteps

if TYPE_CHECKING:
    from diffrl.config import Config

STRENGTH = one_or_two("a number of at least 0, or [LOW, HIGH]", float, 0, LARGEST, rising=True)


class CRDSection(ForwardProcess):
    method = Method(
        "crd",
        "CRD",
        {"CRD": "2603.14128"},
        about="centered reward distillation",
        trainer="diffrl.methods.crd.objective:CRD",
    )
    whole_groups: ClassVar[bool] = True  # a group's rewards are centred together: it stays in one optimiser step
    beta: Annotated[float | tuple[float, float], STRENGTH, AS_IS] = key(
        (1e-4, 0.1),
        "weight of mean (v_theta - v_ref)^2, v_ref guided; [LOW, HIGH]: by reward, LOW for the lowest to HIGH for the "
        "highest; a number: for all; 0 runs no reference forward",
    )
    anchor_guidance: FiniteFloat = key(4.5, "guidance of v_ref, the pretrained prediction; 1 is none", ge=1)
    b: FiniteFloat = key(1.0, "scale of the implicit reward against the external one", gt=0)
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    same_noise: bool = key(
        True, "the images of a group share a row's noise, too: a less noisy gradient; false: each its own, as published"
    )
    old: Schedule = key(Decay(0, 0.25, 0.005, 0.999), f"the snapshot behind the implicit reward: {FOLLOWS}")

    def check(self, config: Config) -> None:
        check_timesteps("crd", self, config.rollout)
