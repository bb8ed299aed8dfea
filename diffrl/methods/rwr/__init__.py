"""Weighted regression on the images: RWR, SFT, SRUM's cells."""

from __future__ import annotations

from typing import Literal

from pydantic import FiniteFloat

from diffrl.config.base import Method, key
from diffrl.methods.shared.sections import KL, Drawn


class RWRSection(Drawn):
    method = Method(
        "rwr",
        "RWR",
        {"Flow-RWR": "2501.13918", "ORW-CFM-W2": "2502.06061"},
        about="reward-weighted regression",
        options={("weights", "linear"): {"SRUM": "2510.12784"}},
        trainer="diffrl.methods.rwr.objective:Regression",
        advantages="own",
        spatial=True,
    )
    beta: FiniteFloat = key(0.0, KL, ge=0)
    weights: Literal["softmax", "exp", "linear", "best"] = key(
        "softmax",
        "softmax(r / tau) over the group times its size, exp(A / tau) of the group's advantage; or r + 0.5, "
        "below 0 of which is unlearned (SRUM); best: 1 for a group's best image alone, fine-tuning on it (SFT)",
    )
    tau: FiniteFloat = key(1.0, "temperature, in units of the weighted sum of rewards (exp: of advantages)", gt=0)

    @property
    def by_cells(self) -> bool:
        """Does the loss take an advantage of each latent cell?"""
        return self.weights == "linear"
