"""DGPO: direct group preference optimisation."""

from __future__ import annotations

from typing import ClassVar

from pydantic import FiniteFloat

from diffrl.config.base import Method, key
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd
from diffrl.methods.shared.sections import KL, Ranked


class DGPOSection(Ranked):
    method = Method(
        "dgpo",
        "DGPO",
        {"DGPO": "2510.08425"},
        about="direct group preference optimisation",
        trainer="diffrl.methods.dgpo.objective:DGPO",
    )
    whole_groups: ClassVar[bool] = True
    b: FiniteFloat = key(100.0, "scale of the group's preference: how soon its sigmoid saturates", gt=0)
    clip: FiniteFloat | None = key(
        1e-3,
        "an image whose error moved by more than this to where its advantage pushes is pushed no further; null: none",
        gt=0,
    )
    advantage_std: AdvantageStd = key("group", ADVANTAGE_STD)
    beta: FiniteFloat = key(1e-3, KL, ge=0)
    anchor_guidance: FiniteFloat | None = key(
        None,
        "guidance of that v_ref, and of the pretrained reference's error; 1: none; null: that of the trained rows",
        ge=1,
    )
    sample_old: int | None = key(
        None,
        "a snapshot that follows slowly draws the images from here on; null: the trained weights do",
        "optimiser steps",
        ge=0,
    )
