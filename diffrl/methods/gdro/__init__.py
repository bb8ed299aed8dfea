"""GDRO: group-level direct reward optimisation."""

from __future__ import annotations

from typing import ClassVar

from pydantic import FiniteFloat

from diffrl.config.base import Method, key
from diffrl.methods.shared.sections import Ranked


class GDROSection(Ranked):
    method = Method(
        "gdro",
        "GDRO",
        {"GDRO": "2601.02036"},
        about="group-level direct reward optimisation",
        trainer="diffrl.methods.gdro.objective:GDRO",
        advantages="own",
    )
    whole_groups: ClassVar[bool] = True
    beta: ClassVar[float] = 0.0
    b: FiniteFloat = key(
        12.0, "scale of the implicit reward; calibrate gdro/implicit_std to about gdro/reward_std", gt=0
    )
    tau: FiniteFloat = key(0.05, "temperature of the soft targets, in units of the weighted sum of rewards", gt=0)
