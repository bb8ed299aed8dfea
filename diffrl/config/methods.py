"""The config's sections of the methods: objectives and what wraps them. Papers: Flow-GRPO 2505.05470, DiffusionNFT
2509.16117.

An objective's section has `trained_steps` and is named like it; a method that wraps objectives is a section that is
None (off) unless it is given. What a section needs of the rest of the config, it says in its own `check`.
"""

from __future__ import annotations

import math
import string
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FiniteFloat

from diffrl.config.base import (
    GIVEN,
    PAIR,
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
    method = Method("nft", "DiffusionNFT", {"DiffusionNFT": "2509.16117"}, trainer="diffrl.trainers.nft:NFT")
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
        trainer="diffrl.trainers.grpo:GRPO",
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
        "crd", "CRD", {"CRD": "2603.14128"}, about="centered reward distillation", trainer="diffrl.trainers.crd:CRD"
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


class Align(Section):
    """Direct-Align. Defaults: SRPO's released code for FLUX and HPS-v2.1 (its SRPO.py and SRPO_training_hpsv2.sh)."""

    branches: Literal["both", "denoise"] = key(
        "both", "both: of each level a row that is denoised down to it, and one that is inverted up to it"
    )
    step: FiniteFloat = key(
        0.02145, "width of the step, in noise levels; less where that would leave the range", gt=0, lt=1
    )
    range: Annotated[tuple[FiniteFloat, FiniteFloat], PAIR] = key(
        (0.75, 0.964), "noise levels that are trained, drawn evenly: the early ones, which hack less"
    )
    noise: Literal["initial", "fresh"] = key(
        "initial", "images are noised with what they were drawn from, or with new noise (its code for photographs)"
    )

    @property
    def rows(self) -> int:
        """Rows of one level."""
        return 2 if self.branches == "both" else 1


class Pair(Section):
    """SRPO's relative reward, with the words and discounts of its released code (SRPO.py)."""

    positive: list[str] = key(["Natural-lighting", "Detail", "Detailed", "Real"], "words for what is wanted")
    negative: list[str] = key(
        ["Concept art", "Painting", "Anime", "Flat", "Oil"], "words for what is not; each row draws one of both"
    )
    form: str = key("{word}. {prompt}", "how a word is put to a prompt, for the reward alone")
    denoise: Annotated[tuple[FiniteFloat, FiniteFloat], PAIR] = key(
        (0.1, 0.25), "k of (1 + k) R(positive) - R(negative), from the range's low end to its high one"
    )
    inversion: Annotated[tuple[FiniteFloat, FiniteFloat], PAIR] = key(
        (0.3, 0.01), "k of (1 + k) R(negative) - R(positive), likewise"
    )
    hinge: FiniteFloat | None = key(
        0.7, "a row whose reward, times its weight, is above this has no gradient; null: all have one"
    )

    def check_forms(self) -> None:
        for name in ("positive", "negative"):
            if not all(word.strip() for word in getattr(self, name)) or not getattr(self, name):
                raise Problem(f"direct.pair.{name}", "expected at least one word, and none that is empty")
        try:
            fields = sorted(str(field) for _, field, _, _ in string.Formatter().parse(self.form) if field is not None)
        except ValueError:
            fields = []
        if fields != ["prompt", "word"]:
            raise Problem("direct.pair.form", f'expected {{word}} and {{prompt}}, once each, got "{self.form}"')


class Direct(Section):
    method = Method(
        "direct",
        "direct back-propagation",
        {"D2-Align": "2512.24146"},
        options={
            ("align", GIVEN): {"SRPO": "2509.06942"},
            ("path", GIVEN): {"R0": "2503.13070"},
            ("cap", GIVEN): {"OneReward": "2508.21066"},
        },
        about="back-propagation of a differentiable reward, as in D2-Align",
        trainer="diffrl.trainers.direct:Direct",
        advantages="none",
        decodes=True,
        rewards="differentiable",
    )
    beta: FiniteFloat = key(0.0, "weight of mean (v_theta - v_ref)^2; 0 runs no reference forward", ge=0)
    timesteps: int = key(1, "trained timesteps per image, drawn from the sampling schedule", "timesteps", ge=1)
    guidance_scale: FiniteFloat = key(1.0, "guidance of the trained prediction; 1 is none", ge=1)
    decode_chunk: int | None = key(
        None, "images decoded and judged at a time; null: a micro-batch at once", "images", ge=1
    )
    checkpoint_decoder: bool = key(
        False, "recompute the decoder's activations, chunk by chunk, in the backward pass: less memory, more time"
    )

    align: Align | None = key(
        None, "Direct-Align, in the place of steps from a level of the sampling schedule to the next; present = on"
    )
    path: Literal["all", "random"] | None = key(
        None,
        "R0, in the place of one step from a noised image: all: the gradient goes through every step of the sampler; "
        "random: the image that one state of the path predicts, nothing before it",
    )
    pair: Pair | None = key(None, "with align, SRPO: a reward's difference for two prompts in its place; present = on")
    cap: FiniteFloat | None = key(
        None,
        "OneReward's lambda: a row whose reward, times its weight, is above this has no gradient; null: all have one",
    )

    def trained_steps(self, rollout: Sampling) -> int:
        return self.timesteps * (self.align.rows if self.align else 1)

    def check(self, config: Whole) -> None:
        from diffrl.rewards.registry import declares

        steps, needs = config.rollout.steps, 'objective "direct" back-propagates through every image\'s reward alone'
        if self.timesteps > steps and self.align is None:
            text = f"{self.timesteps} timesteps, but the schedule has only {steps} (rollout.steps)"
            raise Problem("direct.timesteps", text)
        for name, entry in config.rewards.items():
            plugin = entry.plugin or name
            if declares(plugin, "differentiable") is False:
                raise Problem(f"rewards.{name}", f'"{plugin}" is not differentiable, and {needs}')
            for able, what in (("groupwise", "groups"), ("batchwise", "batches")):
                if declares(plugin, able):
                    raise Problem(f"rewards.{name}", f'"{plugin}" judges whole {what}, and {needs}')
        if self.align is not None:
            self._check_align(self.align, config)
        if self.path is not None:
            self._check_path(config)
        if self.pair is not None:
            self._check_pair(self.pair, config)
            if self.cap is not None:
                raise Problem("direct.cap", f"{self.cap:g}, but direct.pair has its own, hinge: leave it out")

    def _check_path(self, config: Whole) -> None:
        if self.align is not None:
            raise Problem("direct.path", "trains on the sampler's states, direct.align on noised images: leave one out")
        if self.path == "all" and self.timesteps > 1:
            raise Problem("direct.timesteps", f"{self.timesteps}, but with direct.path: all an image is one row")
        if self.path == "all" and (self.beta or config.gardo is not None):
            key = "direct.beta" if self.beta else "gardo"
            raise Problem(
                key, "with direct.path: all there is no one prediction to penalise; use optimise.weight_decay"
            )
        if config.rollout.tail is not None and self.path == "random":
            raise Problem("direct.path", "random needs every step's state, and rollout.tail goes another way: use all")
        if config.d2align is not None and config.d2align.embed == "reconstructed":
            text = '"reconstructed" is of noised images, and direct.path trains on none: use image'
            raise Problem("d2align.embed", text)

    def _check_align(self, align: Align, config: Whole) -> None:
        low, high = align.range
        if not 0 <= low < high < 1:
            raise Problem("direct.align.range", f"expected two noise levels, 0 <= low < high < 1, got {low}, {high}")
        if config.d2align is not None and config.d2align.embed == "reconstructed":
            text = '"reconstructed" is from the schedule\'s levels, and direct.align trains at others: use image'
            raise Problem("d2align.embed", text)

    def _check_pair(self, pair: Pair, config: Whole) -> None:
        from diffrl.rewards.registry import declares

        pair.check_forms()
        if self.align is None:
            raise Problem(
                "direct.pair", "its discounts run over direct.align.range; give direct.align, too ({} is SRPO's)"
            )
        if self.align.branches == "denoise" and pair.inversion != type(pair).model_fields["inversion"].default:
            raise Problem("direct.pair.inversion", "has no effect with direct.align.branches: denoise; leave it out")
        twice = "which takes the same difference in the reward's text space; leave one of them out"
        if config.d2align is not None:
            raise Problem("direct.pair", f"there is d2align, {twice}")
        for name, entry in config.rewards.items():
            plugin = entry.plugin or name
            if plugin.split(":")[0] == "d2":
                raise Problem("direct.pair", f'rewards.{name} is "{plugin}", {twice}')
            if declares(plugin, "embeds") is False:
                text = f'"{plugin}" does not embed its prompts (`embeds`), so direct.pair cannot tell two apart'
                raise Problem(f"rewards.{name}", f"{text}; clip, pickscore, hpsv2 do")
