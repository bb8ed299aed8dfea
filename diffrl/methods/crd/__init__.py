"""CRD: centered reward distillation."""

from __future__ import annotations

from typing import ClassVar

from pydantic import FiniteFloat

from diffrl.config.base import Method, Whole, key
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd, Decay, ForwardProcess
from diffrl.methods.shared.sections import FOLLOWS, Schedule, check_timesteps


class CRDSection(ForwardProcess):
    method = Method(
        "crd",
        "CRD",
        {"CRD": "2603.14128"},
        about="centered reward distillation",
        trainer="diffrl.methods.crd.objective:CRD",
    )
    whole_groups: ClassVar[bool] = True  # a group's rewards are centred together: it stays in one optimiser step
    beta: FiniteFloat = key(0.1, "weight of mean (v_theta - v_ref)^2, v_ref guided; 0 runs no reference forward", ge=0)
    anchor_guidance: FiniteFloat = key(4.5, "guidance of v_ref, the pretrained prediction; 1 is none", ge=1)
    adaptive: bool = key(True, "beta by reward, from 1e-4 for the lowest to beta for the highest; false: beta for all")
    b: FiniteFloat = key(1.0, "scale of the implicit reward against the external one", gt=0)
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    same_noise: bool = key(
        True, "the images of a group share a row's noise, too: a less noisy gradient; false: each its own, as published"
    )
    old: Schedule = key(Decay(0, 0.25, 0.005, 0.999), f"the snapshot behind the implicit reward: {FOLLOWS}")

    def check(self, config: Whole) -> None:
        check_timesteps("crd", self, config.rollout)
