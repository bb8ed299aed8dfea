"""The config's sections of the methods: objectives and what wraps them. Papers: Flow-GRPO 2505.05470, DiffusionNFT
2509.16117.

An objective's section has `trained_steps` and is named like it; a method that wraps objectives is a section that is
None (off) unless it is given. What a section needs of the rest of the config, it says in its own `check`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import FiniteFloat

from diffrl.config.base import QUIET_STEPS, Problem, Section, Share, key, section

if TYPE_CHECKING:
    from diffrl.config.schema import Config, Rollout

AdvantageStd = Literal["group", "batch", "none"]
ADVANTAGE_STD = "what A = R - group mean is divided by: the std of the group, of the epoch's batch, or nothing"
ADV_CLIP = "advantages are clipped to plus or minus this"


class Objective(Protocol):
    """What makes a section an objective's; the section is named like it."""

    def trained_steps(self, rollout: Rollout) -> int:
        """Timesteps that are trained per image."""


class Decay(Section):
    """d(step) = 0 before `start`, then min(value + slope * (step - start), cap)."""

    start: int = key(0, "the decay is 0 before this optimiser step", "optimiser steps", ge=0)
    value: Share = key(0.0, "decay at start; 0 copies the trained weights")
    slope: FiniteFloat = key(0.001, "growth of the decay", "per optimiser step", ge=0)
    cap: Share = key(0.5, "largest decay")


class NFT(Section):
    beta: FiniteFloat = key(1e-4, "weight of mean (v_theta - v_ref)^2; 0 runs no reference forward", ge=0)
    b: FiniteFloat = key(1.0, "mix of v_theta and v_old in v+ and v-; 0.1 for OCR and several rewards", gt=0)
    adv_clip: FiniteFloat = key(5.0, ADV_CLIP, gt=0)
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    timesteps: int | None = key(None, "trained timesteps per image; null: rollout.steps", "timesteps", ge=1)
    timestep_sampling: Literal["schedule", "uniform", "logit_normal"] = key(
        "schedule", "the sampling schedule's own timesteps without repeats, or draws from (0, 1)"
    )
    old: Decay = section(
        Decay, "how the old snapshot, which draws the images, follows: old <- d old + (1 - d) theta each epoch"
    )

    def trained_steps(self, rollout: Rollout) -> int:
        return self.timesteps or rollout.steps

    def check(self, config: Config) -> None:
        steps = config.rollout.steps
        if self.timestep_sampling == "schedule" and (self.timesteps or 0) > steps:
            raise Problem(
                "nft.timesteps", f"{self.timesteps} timesteps, but the schedule has only {steps} (rollout.steps)"
            )


class GRPO(Section):
    advantage_std: AdvantageStd = key("group", ADVANTAGE_STD)
    clip: FiniteFloat = key(1e-4, "the importance ratio is clipped to 1 plus or minus this", gt=0)
    adv_clip: FiniteFloat = key(5.0, ADV_CLIP, gt=0)
    beta: FiniteFloat = key(0.0, "weight of the KL divergence to the reference; 0 runs no reference forward", ge=0)
    timesteps: int | None = key(None, "how many of the stochastic steps are trained; null: all", "steps", ge=1)

    def trained_steps(self, rollout: Rollout) -> int:
        return self.timesteps or rollout.stochastic_steps

    def check(self, config: Config) -> None:
        rollout = config.rollout
        needs = 'but objective "grpo" needs log-probabilities'
        if rollout.sampler not in QUIET_STEPS:
            choices = ", ".join(QUIET_STEPS)
            raise Problem("rollout.sampler", f'"{rollout.sampler}" is deterministic, {needs}: use one of {choices}')
        if rollout.noise_level == 0:
            raise Problem("rollout.noise_level", f"0 is deterministic, {needs}: use more than 0")
        if rollout.stochastic_steps == 0:
            raise Problem("rollout.steps", f"{rollout.steps} of {rollout.sampler} has no stochastic step, {needs}")
        if (self.timesteps or 0) > rollout.stochastic_steps:
            source = "rollout.window" if rollout.window else "rollout.steps"
            text = f"{self.timesteps} steps, but only {rollout.stochastic_steps} are stochastic ({source})"
            raise Problem("grpo.timesteps", text)
