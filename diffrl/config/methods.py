"""The config's sections of the methods: objectives and what wraps them. Papers: Flow-GRPO 2505.05470, DiffusionNFT
2509.16117.

An objective's section has `trained_steps` and is named like it; a method that wraps objectives is a section that is
None (off) unless it is given. What a section needs of the rest of the config, it says in its own `check`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import FiniteFloat, PlainValidator
from pydantic_core import PydanticCustomError

from diffrl.config.base import PAIR, QUIET_STEPS, PathText, Problem, Sampling, Section, Share, Whole, key, section
from diffrl.errors import nearest

AdvantageStd = Literal["group", "sample", "batch", "none"]
ADVANTAGE_STD = "A = R - group mean is divided by the std of the group (sample: with n - 1), of the epoch's batch, or 1"
ADV_CLIP = "advantages are clipped to plus or minus this"
TIMESTEP_FRACTION = "train only this share of the schedule's timesteps, the noisiest, which decide the composition"


class Objective(Protocol):
    """What makes a section an objective's; the section is named like it."""

    def trained_steps(self, rollout: Sampling) -> int:
        """Timesteps that are trained per image."""


class Decay(Section):
    """d(step) = 0 before `start`, then min(value + slope * (step - start), cap)."""

    start: int = key(0, "the decay is 0 before this optimiser step", "optimiser steps", ge=0)
    value: Share = key(0.0, "decay at start; 0 copies the trained weights")
    slope: FiniteFloat = key(0.001, "growth of the decay", "per optimiser step", ge=0)
    cap: Share = key(0.5, "largest decay")


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


class NFT(ForwardProcess):
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
    advantage_std: AdvantageStd = key("batch", ADVANTAGE_STD)
    clip: FiniteFloat = key(1e-4, "the importance ratio is clipped to 1 plus or minus this", gt=0)
    clip_low: FiniteFloat | None = key(
        None,
        "the ratio is clipped below at 1 minus this, which negative advantages meet (NGRPO); null: clip",
        gt=0,
        lt=1,
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
    weighting: Literal["uniform", "noise"] = key(
        "uniform", "noise: a step's loss times the noise that it draws, which evens out the steps' gradients (TempFlow)"
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
        if self.guidance_gradient == "published" and rollout.guidance_scale == 1:
            text = '"published" is about guidance, but rollout.guidance_scale is 1: leave it out'
            raise Problem("grpo.guidance_gradient", text)


class CRDOld(Decay):
    value: Share = key(0.25, "decay at start; 0 copies the trained weights")
    slope: FiniteFloat = key(0.005, "growth of the decay", "per optimiser step", ge=0)
    cap: Share = key(0.999, "largest decay")


class CRDSampling(Decay):
    start: int = key(75, "the decay is 0 before this optimiser step", "optimiser steps", ge=0)
    slope: FiniteFloat = key(0.0075, "growth of the decay", "per optimiser step", ge=0)
    cap: Share = key(0.999, "largest decay")


class CRD(ForwardProcess):
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


# KL at which GARDO's reference is renewed: the paper's for GRPO (7 times as much by the exact KL, whose mean over a
# schedule of 10 steps is that much larger), and where the authors' NFT script starts for distances of velocities.
AUTO_RESET = {"published": 1e-4, "exact": 7e-4, "velocity": 0.15}


def _threshold(value: Any) -> float | str | None:
    if value is None or value == "auto":
        return value
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise PydanticCustomError("threshold", 'a number above 0, "auto" or null')
    return float(value)


# One validator for all three kinds: pydantic's own would report each of them.
Threshold = Annotated[float | Literal["auto"] | None, PlainValidator(_threshold)]


class Reset(Section):
    kl: Threshold = key(
        "auto",
        "theta becomes the reference after a step whose penalised rows lie farther from it; null: never; auto: for "
        "grpo 1e-4 with the published kl, 7e-4 with the exact one; 0.15 for the others",
        "the penalty over beta: KL of a step (grpo), else mean squared difference of velocities",
    )
    steps: int | None = key(100, "and so many steps after it last did; null: never", "optimiser steps", ge=1)


class GARDO(Section):
    auxiliary: list[str] = key(
        [], "names under watch that the optimised score is compared with, scored on training images, too; not optimised"
    )
    beta: FiniteFloat | None = key(
        0.04, "weight of the penalised rows' KL, in place of the objective's own beta; null: the objective's", ge=0
    )
    normalise: Literal["rows", "gated"] = key(
        "rows", "the KL is averaged over all rows of a step (paper) or over its penalised ones (authors' code)"
    )
    advantage_std: AdvantageStd | None = key("none", f"{ADVANTAGE_STD}; null: as the objective does")
    diversity: Literal["off", "raw", "group_mean"] = key(
        "group_mean",
        "positive advantages times the distance to the nearest image of the group (evaluate.features): as it is "
        "(paper), or over its group mean (authors' code)",
    )
    gate: Literal["batch", "group", "all"] = key(
        "batch",
        "who is penalised: the share with the highest U of the epoch's samples with U >= 0 (authors' code), of each "
        "group (paper), or all: no gate",
    )
    share: FiniteFloat = key(0.1, "share of samples that is penalised at first", gt=0, le=1)
    share_range: Annotated[tuple[FiniteFloat, FiniteFloat], PAIR] = key((0.02, 0.2), "limits of the share")
    change: Share = key(0.1, "the share grows or shrinks by this when the mean U leaves the window's range")
    window: int = key(20, "mean U of so many epochs are kept", "epochs", ge=1)
    window_full: bool = key(False, "the share first moves when the window is full (paper), not at once (authors' code)")
    reset: Reset = section(Reset, "when the trained weights become the reference")
    measure_every: int | None = key(
        None, "measure the KL of all rows, too, in every so many-th step (it costs forwards)", "optimiser steps", ge=1
    )

    def reset_kl(self, config: Whole) -> float | None:
        """reset.kl, with "auto" in the units of the objective's KL."""
        if self.reset.kl != "auto":
            return self.reset.kl
        base: Any = config.objective_section
        return AUTO_RESET[getattr(base, "kl", "velocity")]

    def check(self, config: Whole) -> None:
        objective = config.objective
        base: Any = config.objective_section
        own = getattr(base, "beta", None)
        if own is None:
            raise Problem("gardo", f'objective "{objective}" has no KL penalty that could be gated')
        default = type(base).model_fields["beta"].default
        if self.beta is not None and own not in (0, default, self.beta):
            text = f"{own:g}, but gardo.beta {self.beta:g} takes its place; set gardo.beta (null: {objective}.beta)"
            raise Problem(f"{objective}.beta", text)
        if self.gate != "all" and not self.auxiliary:
            known = ", ".join(config.watch) or "nothing yet"
            raise Problem("gardo.auxiliary", f"empty; name at least one reward that is under watch (there is: {known})")
        for name in self.auxiliary:
            self._check_auxiliary(name, config)
        low, high = self.share_range
        if not 0 < low <= high <= 1:
            raise Problem("gardo.share_range", f"[{low:g}, {high:g}]: expected 0 < first <= last <= 1")
        if not low <= self.share <= high:
            raise Problem("gardo.share", f"{self.share:g} is not within [{low:g}, {high:g}] (gardo.share_range)")

    def _check_auxiliary(self, name: str, config: Whole) -> None:
        where = "gardo.auxiliary"
        if self.auxiliary.count(name) > 1:
            raise Problem(where, f'"{name}" is named twice')
        if name in config.rewards:
            text = f'"{name}" is in rewards; what is optimised cannot judge itself: name a reward that is under watch'
            raise Problem(where, text)
        if name not in config.watch:
            raise Problem(where, f'"{name}" is not under watch{nearest(name, config.watch)}')
        entry = config.watch[name]
        for other, reward in config.rewards.items():
            if (reward.plugin or other, reward.arguments) == (entry.plugin or name, entry.arguments):
                raise Problem(where, f'"{name}" is the optimised reward "{other}" by another name')


class Direct(Section):
    beta: FiniteFloat = key(0.0, "weight of mean (v_theta - v_ref)^2; 0 runs no reference forward", ge=0)
    timesteps: int = key(1, "trained timesteps per image, drawn from the sampling schedule", "timesteps", ge=1)
    guidance_scale: FiniteFloat = key(1.0, "guidance of the trained prediction; 1 is none", ge=1)
    decode_chunk: int | None = key(
        None, "images decoded and judged at a time; null: a micro-batch at once", "images", ge=1
    )
    checkpoint_decoder: bool = key(
        False, "recompute the decoder's activations, chunk by chunk, in the backward pass: less memory, more time"
    )

    def trained_steps(self, rollout: Sampling) -> int:
        return self.timesteps

    def check(self, config: Whole) -> None:
        from diffrl.rewards.registry import declares

        steps, needs = config.rollout.steps, 'objective "direct" back-propagates through every image\'s reward alone'
        if self.timesteps > steps:
            text = f"{self.timesteps} timesteps, but the schedule has only {steps} (rollout.steps)"
            raise Problem("direct.timesteps", text)
        for name, entry in config.rewards.items():
            plugin = entry.plugin or name
            if declares(plugin, "differentiable") is False:
                raise Problem(f"rewards.{name}", f'"{plugin}" is not differentiable, and {needs}')
            if declares(plugin, "groupwise"):
                raise Problem(f"rewards.{name}", f'"{plugin}" judges whole groups, and {needs}')
        if config.gardo is not None and config.gardo.diversity != "off":
            text = f'{config.gardo.diversity} shapes advantages, which objective "direct" does not use; set it to off'
            raise Problem("gardo.diversity", text)


class D2Align(Section):
    reward: str | None = key(None, "which one of `rewards` is corrected; it must embed prompts; null: the only one")
    direction: PathText | None = key(
        None, "a file that `diffrl d2align learn` wrote; null: learned before the training, in RUN_DIR/d2align"
    )
    word: str | None = key(
        None,
        'not learned: b_v is what this word at the prompts\' end, as in "a red circle, realistic", adds on average',
    )
    omega: FiniteFloat = key(1.5, "weight of e+ against e- in the guided embedding; 0.5 is their middle")
    steps: int = key(3000, "steps in which the direction is learned", "optimiser steps", ge=1)
    learning_rate: FiniteFloat = key(
        5e-6, "Adam's step size for the direction: each of its numbers moves at most steps times this", gt=0
    )
    batch_size: int = key(64, "images per step", "images", ge=1)
    embed: Literal["image", "reconstructed"] = key(
        "image",
        "what of an image is embedded: itself; reconstructed: noised to a random level of the schedule and predicted "
        "back in one step by the frozen model, as stage 2 sees it (the paper's Algorithm 1)",
    )
    pool: int = key(
        2048, "images of the frozen model, drawn and embedded once, that the steps draw from", "images", ge=1
    )

    def corrected(self, config: Whole) -> str:
        """Name of the reward that is corrected."""
        return self.reward or next(iter(config.rewards))

    def check(self, config: Whole) -> None:
        from diffrl.rewards.registry import declares

        names = list(config.rewards)
        if self.reward is None and len(names) > 1:
            raise Problem("d2align.reward", f"null, but there are {len(names)} rewards; name one of {', '.join(names)}")
        name = self.corrected(config)
        if name not in names:
            raise Problem("d2align.reward", f'"{name}" is not in rewards{nearest(name, names)}')
        plugin = config.rewards[name].plugin or name
        if declares(plugin, "embeds") is False:
            text = f'"{plugin}" does not embed its prompts (`embeds`), so d2align cannot correct it'
            raise Problem("d2align.reward" if self.reward else f"rewards.{name}", f"{text}; clip, pickscore, hpsv2 do")
        if plugin.split(":")[0] == "d2":
            raise Problem(f"rewards.{name}", f'"{plugin}" is corrected already; leave out the section d2align')
        if self.direction is not None and self.word is not None:
            raise Problem("d2align.word", f'"{self.word}", but d2align.direction names a file; give one of them')
        if self.direction is not None and not Path(self.direction).is_file():
            raise Problem("d2align.direction", f'no file "{self.direction}"; null learns one')


class Marble(Section):
    mode: Literal["fresh", "full", "amortised", "uniform", "sequential", "advantages", "sum"] = key(
        "amortised",
        "amortised: coefficients are solved for every N steps (the paper); fresh: in every step, with normalised "
        "gradients; full: the same from one backward pass for each reward; uniform: 1 / K of each normalised gradient; "
        "sequential: one reward after the other; advantages: the weighted sum of advantages; sum: of rewards, as "
        "without marble but measured",
    )
    smoothing: Share = key(0.7, "rho of abar <- rho abar + (1 - rho) alpha*, per solve; 0: no memory")
    smooth: Literal["between", "everywhere"] = key(
        "between",
        "where abar is used: in the steps between two solves, the solving step taking alpha* itself (the paper), or in "
        "that one, too",
    )
    every: int = key(10, "N of mode amortised", "optimiser steps", ge=1)
    stage: int = key(10, "mode sequential: how long each reward is trained before the next", "epochs", ge=1)
    uniform_after: int | None = key(
        None, "after so many epochs the coefficients are uniform (the paper's last stage); null: never", "epochs", ge=0
    )
    measure: bool = key(
        True, "modes sequential, advantages, sum: log each reward's gradient and its cosine to the step (more time)"
    )

    def check(self, config: Whole) -> None:
        if self.uniform_after is not None and self.mode not in ("fresh", "full", "amortised"):
            text = f'{self.uniform_after}, but mode "{self.mode}" solves for no coefficients that could become uniform'
            raise Problem("marble.uniform_after", text)
        if len(config.rewards) < 2:
            only = ", ".join(config.rewards)
            raise Problem("marble", f"there is one reward ({only}), so nothing to balance; leave marble out")
        if config.objective == "direct" and self.mode in ("sum", "advantages"):
            raise Problem("marble.mode", f'"{self.mode}" sums scores or advantages, and objective "direct" has none')
