"""From a config's `objective` to the object that trains: one line for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffrl.rollout import SamplerSpec
from diffrl.trainers.algorithm import Decay, Objective
from diffrl.trainers.grpo import GRPO
from diffrl.trainers.nft import NFT

if TYPE_CHECKING:
    from diffrl.config import Config


def build_objective(config: Config, spec: SamplerSpec) -> Objective:
    """The objective that the config names; its section's keys are the constructor's arguments."""
    arguments = getattr(config, config.objective).model_dump()
    if config.objective == "grpo":
        return GRPO(spec, **arguments)
    arguments["old"] = Decay(**arguments["old"])
    return NFT(**arguments)
