"""The config's sections of the methods: objectives and what wraps them. Papers: Flow-GRPO 2505.05470, DiffusionNFT
2509.16117.

An objective's section has `trained_steps` and is named like it; a method that wraps objectives is a section that is
None (off) unless it is given. What a section needs of the rest of the config, it says in its own `check`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import FiniteFloat

from diffrl.config.base import (
    STOCHASTIC,
    Method,
    Problem,
    Sampling,
    Section,
    Share,
    Whole,
    key,
    section,
)

AdvantageStd = Literal["group", "sample", "batch", "none"]
ADVANTAGE_STD = "A = R - group mean is divided by the std of the group (sample: with n - 1), of the epoch's batch, or 1"
ADV_CLIP = "advantages are clipped to plus or minus this"
TIMESTEP_FRACTION = "train only this share of the schedule's timesteps, the noisiest, which decide the composition"


class Decay(Section):
    """d(step) = 0 before `start`, then min(value + slope * (step - start), cap)."""

    start: int = key(0, "the decay is 0 before this optimiser step", "optimiser steps", ge=0)
    value: Share = key(0.0, "decay at start; 0 copies the trained weights")
    slope: FiniteFloat = key(0.001, "growth of the decay", "per optimiser step", ge=0)
    cap: Share = key(0.5, "largest decay")

    def __call__(self, step: int) -> float:
        return 0.0 if step < self.start else min(self.value + self.slope * (step - self.start), self.cap)


def noisiest(rollout: Sampling, fraction: float) -> int:
    """How many of the schedule's timesteps a fraction of it is, at least one."""
    return max(math.ceil(rollout.steps * fraction - 1e-9), 1)


def check_timesteps(name: str, section: Any, rollout: Sampling) -> None:
    """The section `name` trains no more timesteps without repeats than there are, and says what a fraction is of."""
    if section.timestep_sampling == "schedule":
        levels = noisiest(rollout, section.timestep_fraction)
        if (section.timesteps or 0) > levels:
            fraction = f" x {name}.timestep_fraction" if section.timestep_fraction < 1 else ""
            text = f"{section.timesteps} timesteps, but the schedule has only {levels} (rollout.steps{fraction})"
            raise Problem(f"{name}.timesteps", text)
    elif section.timestep_fraction < 1:
        text = f'is a share of the schedule\'s timesteps, but {name}.timestep_sampling is "{section.timestep_sampling}"'
        raise Problem(f"{name}.timestep_fraction", text)


class ForwardProcess(Section):
    """What DiffusionNFT and CRD share: images are noised again, at timesteps of the sampling schedule."""

    timesteps: int | None = key(None, "trained timesteps per image; null: rollout.steps", "timesteps", ge=1)
    timestep_fraction: FiniteFloat = key(1.0, TIMESTEP_FRACTION, gt=0, le=1)

    def trained_steps(self, rollout: Sampling) -> int:
        return self.timesteps or self.levels(rollout)

    def levels(self, rollout: Sampling) -> int:
        """How many of the schedule's timesteps, from the noisiest on, are trained."""
        return noisiest(rollout, self.timestep_fraction)

    def arguments(self, config: Whole) -> dict[str, Any]:
        """Levels in place of the fraction."""
        result = super().arguments(config) | {"levels": self.levels(config.rollout)}
        del result["timestep_fraction"]
        return result


class NFT(ForwardProcess):
    method = Method(
        "nft", "DiffusionNFT", {"DiffusionNFT": "2509.16117"}, trainer="diffrl.methods.nft.objective:NFT", spatial=True
    )
    beta: FiniteFloat = key(1e-4, "weight of mean (v_theta - v_ref)^2; 0 runs no reference forward", ge=0)
    b: FiniteFloat = key(1.0, "mix of v_theta and v_old in v+ and v-; 0.1 for OCR and several rewards", gt=0)
    adv_clip: FiniteFloat = key(5.0, ADV_CLIP, gt=0)
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    timestep_sampling: Literal["schedule", "uniform", "logit_normal"] = key(
        "schedule", "the sampling schedule's own timesteps without repeats, or draws from (0, 1)"
    )
    old: Decay = section(
        Decay, "how the old snapshot, which draws the images, follows: old <- d old + (1 - d) theta each epoch"
    )

    def check(self, config: Whole) -> None:
        check_timesteps("nft", self, config.rollout)


class GRPO(Section):
    method = Method(
        "grpo",
        "Flow-GRPO",
        {"Flow-GRPO": "2505.05470"},
        options={
            ("ratio", "normalised"): {"GRPO-Guard": "2510.22319"},
            ("trust", "divergence"): {"Flow-DPPO": "2606.11025"},
            ("weighting", "noise"): {"TempFlow-GRPO": "2508.04324"},
            ("weighting", "even"): {"Flash-GRPO": "2605.15980"},
        },
        trainer="diffrl.methods.grpo.objective:GRPO",
        on_steps=True,
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
    trust: Literal["clip", "divergence"] = key(
        "clip",
        "divergence: no clip, but no gradient for what would go further out beyond delta (Flow-DPPO). This and "
        "normalised run a forward without gradient for each row after an epoch's first optimiser step",
    )
    delta: FiniteFloat = key(
        1e-7, "how far a step may go with trust: divergence", "KL, mean over latent dimensions", gt=0
    )
    adv_clip: FiniteFloat = key(5.0, ADV_CLIP, gt=0)
    beta: FiniteFloat = key(0.0, "weight of the KL divergence to the reference; 0 runs no reference forward", ge=0)
    kl: Literal["exact", "published"] = key(
        "exact",
        "exact: KL of the step's Gaussians; published: without the step size in it, as in the released code of "
        "Flow-GRPO and GARDO, whose beta and reset.kl are on that scale (flow_sde, dance; the same elsewhere)",
    )
    timesteps: int | None = key(None, "how many of the stochastic steps are trained; null: all", "steps", ge=1)
    order: Literal["random", "first"] = key(
        "random", "which ones, where not all are: drawn anew for each image and epoch, or the first (Flow-GRPO, GARDO)"
    )
    weighting: Literal["uniform", "noise", "even"] = key(
        "uniform",
        "noise: a step's loss times the noise that it draws, so that its gradient goes by its width alone (TempFlow); "
        "even: all steps' gradients are of a size (Flash-GRPO; with the normalised ratio GRPO-Guard's)",
    )
    skip_zero: bool = key(False, "images whose advantages are all 0 are left out, KL included (Flow-GRPO's code)")
    guidance_gradient: Literal["exact", "published"] = key(
        "exact",
        "under guidance, exact: through the prediction for the empty prompt, too; published: that one is a constant to "
        "the gradient, as in released code of Flow-GRPO",
    )

    def trained_steps(self, rollout: Sampling) -> int:
        return self.timesteps or rollout.stochastic_steps

    def check(self, config: Whole) -> None:
        rollout = config.rollout
        needs = 'but objective "grpo" needs log-probabilities'
        if not rollout.facts.stochastic:
            choices = ", ".join(STOCHASTIC)
            raise Problem("rollout.sampler", f'"{rollout.sampler}" is deterministic, {needs}: use one of {choices}')
        if rollout.noise_level == 0:
            raise Problem("rollout.noise_level", f"0 is deterministic, {needs}: use more than 0")
        if rollout.stochastic_steps == 0:
            raise Problem("rollout.steps", f"{rollout.steps} of {rollout.sampler} has no stochastic step, {needs}")
        if (self.timesteps or 0) > rollout.stochastic_steps:
            source = "rollout.window" if rollout.window else "rollout.steps"
            text = f"{self.timesteps} steps, but only {rollout.stochastic_steps} are stochastic ({source})"
            raise Problem("grpo.timesteps", text)
        self._check_trust()
        if self.guidance_gradient == "published" and rollout.guidance_scale == 1:
            text = '"published" is about guidance, but rollout.guidance_scale is 1: leave it out'
            raise Problem("grpo.guidance_gradient", text)

    def _check_trust(self) -> None:
        """What holds the ratio is one of the two, and the clip is in the unit of what it clips."""
        clip, delta = (type(self).model_fields[name].default for name in ("clip", "delta"))
        if self.trust == "divergence" and self.clip != clip:
            raise Problem("grpo.clip", "trust: divergence clips nothing, so this has no effect: leave it out")
        if self.trust == "clip" and self.delta != delta:
            raise Problem("grpo.delta", "has no effect with trust: clip; set grpo.trust: divergence")
        if self.trust == "clip" and self.ratio == "normalised" and self.clip == clip:
            text = f"{clip:g} is for the plain ratio and hardly ever reached by the normalised one: give it"
            raise Problem("grpo.clip", f"{text} (GRPO-Guard, SD3.5 at 512 px: 2.0e-6 to 4.0e-6)")


class CRDOld(Decay):
    value: Share = key(0.25, "decay at start; 0 copies the trained weights")
    slope: FiniteFloat = key(0.005, "growth of the decay", "per optimiser step", ge=0)
    cap: Share = key(0.999, "largest decay")


class CRDSampling(Decay):
    start: int = key(75, "the decay is 0 before this optimiser step", "optimiser steps", ge=0)
    slope: FiniteFloat = key(0.0075, "growth of the decay", "per optimiser step", ge=0)
    cap: Share = key(0.999, "largest decay")


class CRD(ForwardProcess):
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
    loss: Literal["squared", "bce"] = key("squared", "how centred implicit rewards are fitted to centred external ones")
    tau: FiniteFloat | None = key(
        None,
        "temperature of reward-weighted centring, in units of q in [0, 1]; 0: positive and negative pool; null: plain "
        "mean",
        ge=0,
    )
    weighted: bool = key(True, "each velocity error over its own mean absolute error")
    adv_clip: FiniteFloat = key(5.0, ADV_CLIP, gt=0)
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    timestep_sampling: Literal["schedule", "uniform", "logit_normal"] = key(
        "schedule", "the sampling schedule's own timesteps without repeats, or draws from (0, 1); the same for a group"
    )
    same_noise: bool = key(
        True, "the images of a group share a row's noise, too: a less noisy gradient; false: each its own, as published"
    )
    old: CRDOld = section(CRDOld, "how the snapshot behind the implicit reward follows the trained weights each epoch")
    sampling: CRDSampling = section(CRDSampling, "how the snapshot that draws the images follows each epoch")

    def check(self, config: Whole) -> None:
        check_timesteps("crd", self, config.rollout)
