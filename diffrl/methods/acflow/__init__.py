"""AC-Flow: regression against a critic of the noised image."""

from __future__ import annotations

from pydantic import FiniteFloat

from diffrl.config.base import Method, key
from diffrl.methods.shared.sections import KL, Drawn


class ACFlowSection(Drawn):
    method = Method(
        "acflow",
        "AC-Flow",
        {"AC-Flow": "2510.18072"},
        about="reward-weighted regression against a critic of the noised image",
        trainer="diffrl.methods.acflow.objective:ActorCritic",
        advantages="own",
    )
    beta: FiniteFloat = key(0.0, KL, ge=0)
    tau: FiniteFloat = key(
        0.2,
        "temperature of the weights exp(A / tau), in standard deviations of the reward; a step's weights have mean 1",
        gt=0,
    )
