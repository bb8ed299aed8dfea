"""Flow-GRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import FiniteFloat

from diffrl.config.base import GIVEN, STOCHASTIC, Method, Problem, Sampling, Section, key
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd

if TYPE_CHECKING:
    from diffrl.config import Config

Published = Literal["kl", "first", "skip_zero", "guidance"]


class GRPOSection(Section):
    method = Method(
        "grpo",
        "Flow-GRPO",
        {"Flow-GRPO": "2505.05470"},
        options={
            ("ratio", "normalised"): {"GRPO-Guard": "2510.22319"},
            ("delta", GIVEN): {"Flow-DPPO": "2606.11025"},
            ("weighting", "noise"): {"TempFlow-GRPO": "2508.04324"},
            ("weighting", "even"): {"Flash-GRPO": "2605.15980"},
        },
        trainer="diffrl.methods.grpo.objective:GRPO",
        takes_credit=True,
        needs={"rollout": {"sampler": "flow_sde"}},
    )
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    clip: FiniteFloat = key(1e-4, "the importance ratio is clipped to 1 plus or minus this", gt=0)
    ratio: Literal["plain", "normalised"] = key(
        "plain",
        "normalised: without the ratio's negative mean and its scale by step, so that clip, in another unit (2e-6 to "
        "4e-6 for SD3.5 at 512 px), meets both signs and all steps alike (GRPO-Guard)",
    )
    delta: FiniteFloat | None = key(
        None,
        "no clip, but no gradient for what would go further out beyond this (Flow-DPPO: 1e-7); null: the clip. This "
        "and normalised run a forward without gradient for each row after an epoch's first optimiser step",
        "KL, mean over latent dimensions",
        gt=0,
    )
    adv_clip: FiniteFloat = key(5.0, "advantages are clipped to plus or minus this", gt=0)
    beta: FiniteFloat = key(0.0, "weight of the KL divergence to the reference; 0 runs no reference forward", ge=0)
    published: list[Published] = key(
        [],
        "what is as in the released code of Flow-GRPO and GARDO, in this order. kl: the KL without the step size in "
        "it, the scale of their beta and reset.kl (flow_sde, dance; the same elsewhere); first: where not all steps "
        "are trained, the first are, not those drawn anew for each image and epoch; skip_zero: images whose advantages "
        "are all 0 are left out, KL included; guidance: the prediction for the empty prompt is a constant to the "
        "gradient",
    )
    timesteps: int | None = key(None, "how many of the stochastic steps are trained; null: all", "steps", ge=1)
    weighting: Literal["uniform", "noise", "even"] = key(
        "uniform",
        "noise: a step's loss times the noise that it draws, so that its gradient goes by its width alone (TempFlow); "
        "even: all steps' gradients are of a size (Flash-GRPO; with the normalised ratio GRPO-Guard's)",
    )

    @property
    def kl(self) -> str:
        """The scale of the divergence."""
        return "published" if "kl" in self.published else "exact"

    def trained_steps(self, rollout: Sampling) -> int:
        return self.timesteps or rollout.stochastic_steps

    def check(self, config: Config) -> None:
        rollout = config.rollout
        needs = 'but objective "grpo" needs log-probabilities'
        if not rollout.facts.stochastic:
            choices = ", ".join(STOCHASTIC)
            raise Problem("rollout.sampler", f'"{rollout.sampler}" is deterministic, {needs}: use one of {choices}')
        if rollout.noise == 0:
            raise Problem("rollout.noise_level", f"0 is deterministic, {needs}: use more than 0")
        if rollout.stochastic_steps == 0:
            raise Problem("rollout.steps", f"{rollout.steps} of {rollout.sampler} has no stochastic step, {needs}")
        if (self.timesteps or 0) > rollout.stochastic_steps:
            source = "rollout.window" if rollout.window else "rollout.steps"
            text = f"{self.timesteps} steps, but only {rollout.stochastic_steps} are stochastic ({source})"
            raise Problem("grpo.timesteps", text)
        self._check_trust()
        if "guidance" in self.published and rollout.guidance_scale == 1:
            raise Problem("grpo.published", '"guidance", but rollout.guidance_scale is 1: leave it out')

    def _check_trust(self) -> None:
        """What holds the ratio is one of the two, and the clip is in the unit of what it clips."""
        clip = type(self).model_fields["clip"].default
        if self.delta is not None and self.clip != clip:
            raise Problem("grpo.clip", "has no effect with grpo.delta, which takes its place: leave it out")
        if self.delta is None and self.ratio == "normalised" and self.clip == clip:
            text = f"{clip:g} is for the plain ratio and hardly ever reached by the normalised one: give it"
            raise Problem("grpo.clip", f"{text} (GRPO-Guard, SD3.5 at 512 px: 2.0e-6 to 4.0e-6)")
