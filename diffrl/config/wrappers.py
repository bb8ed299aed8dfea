"""The config's sections of what is put around an objective: GARDO, D2-Align, MARBLE; present = on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import FiniteFloat, PlainValidator
from pydantic_core import PydanticCustomError

from diffrl.config.base import PAIR, Method, PathText, Problem, Section, Share, Whole, key, section
from diffrl.config.methods import ADVANTAGE_STD, AdvantageStd
from diffrl.errors import nearest

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
    method = Method(
        "gardo",
        "GARDO",
        {"GARDO": "2512.24138"},
        about="a gated, adaptive penalty around the objective",
        kind="wrapper",
        trainer="diffrl.methods.gardo.penalty:Gardo",
        state=True,
    )
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
    window: int = key(20, "mean U of so many epochs are kept", "epochs", ge=1)
    window_full: bool = key(False, "the share first moves when the window is full (paper), not at once (authors' code)")
    reset: Reset = section(Reset, "when the trained weights become the reference")

    def arguments(self, config: Whole) -> dict[str, Any]:
        """The reset's two thresholds, in place of its section."""
        result = super().arguments(config) | {"reset_kl": self.reset_kl(config), "reset_steps": self.reset.steps}
        del result["reset"]
        return result

    def reset_kl(self, config: Whole) -> float | None:
        """reset.kl, with "auto" in the units of the objective's KL."""
        if self.reset.kl != "auto":
            return self.reset.kl
        base: Any = config.objective_section
        return AUTO_RESET[getattr(base, "kl", "velocity")]

    def check(self, config: Whole) -> None:
        objective = config.method.name
        base: Any = config.objective_section
        beta = getattr(base, "beta", None)
        if beta is None:
            raise Problem("gardo", f'objective "{objective}" has no KL penalty that could be gated')
        default = type(base).model_fields["beta"].default
        if self.beta is not None and beta not in (0, default, self.beta):
            text = f"{beta:g}, but gardo.beta {self.beta:g} takes its place; set gardo.beta (null: {objective}.beta)"
            raise Problem(f"{objective}.beta", text)
        if config.method.advantages != "any" and self.diversity != "off":
            has = "has none" if config.method.advantages == "none" else "ranks or weighs a group by itself"
            text = f'{self.diversity} shapes advantages, but objective "{objective}" {has}: set it to off'
            raise Problem("gardo.diversity", text)
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
            text = f'"{name}" is in rewards; an optimised reward cannot judge itself: name one under watch'
            raise Problem(where, text)
        if name not in config.watch:
            raise Problem(where, f'"{name}" is not under watch{nearest(name, config.watch)}')
        entry = config.watch[name]
        for other, reward in config.rewards.items():
            same = (reward.plugin or other, reward.arguments, reward.column)
            if same == (entry.plugin or name, entry.arguments, entry.column):
                raise Problem(where, f'"{name}" is the optimised reward "{other}" by another name')


class D2Align(Section):
    method = Method(
        "d2align",
        "D2-Align",
        {"D2-Align": "2512.24146"},
        about="correct a reward by a direction in its text space",
        kind="wrapper",
        rewards="embeds",
        state=True,
    )
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

        if config.method.rewards == "unused":
            raise Problem("d2align", f'corrects a reward, and objective "{config.method.name}" learns from none')
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
    method = Method(
        "marble",
        "MARBLE",
        {"MARBLE": "2605.06507"},
        about="rewards balanced by their gradients",
        kind="wrapper",
        rewards="several",
        trainer="diffrl.methods.marble.combiner:Marble",
        state=True,
    )
    mode: Literal["fresh", "full", "amortised", "uniform", "advantages", "sum"] = key(
        "amortised",
        "amortised: coefficients are solved for every N steps (the paper); fresh: in every step, with normalised "
        "gradients; full: the same from one backward pass for each reward; uniform: 1 / K of each normalised gradient; "
        "advantages: the weighted sum of advantages; sum: of rewards, as "
        "without marble but measured",
    )
    smoothing: Share = key(0.7, "rho of abar <- rho abar + (1 - rho) alpha*, per solve; 0: no memory")
    smooth: Literal["between", "everywhere"] = key(
        "between",
        "where abar is used: in the steps between two solves, the solving step taking alpha* itself (the paper), or in "
        "that one, too",
    )
    every: int = key(10, "N of mode amortised", "optimiser steps", ge=1)
    uniform_after: int | None = key(
        None, "after so many epochs the coefficients are uniform (the paper's last stage); null: never", "epochs", ge=0
    )
    measure: bool = key(
        True, "modes advantages, sum: log each reward's gradient and its cosine to the step (more time)"
    )

    def check(self, config: Whole) -> None:
        if config.method.rewards == "unused":
            raise Problem("marble", f'balances rewards, and objective "{config.method.name}" learns from none')
        if self.uniform_after is not None and self.mode not in ("fresh", "full", "amortised"):
            text = f'{self.uniform_after}, but mode "{self.mode}" solves for no coefficients that could become uniform'
            raise Problem("marble.uniform_after", text)
        if len(config.rewards) < 2:
            only = ", ".join(config.rewards)
            raise Problem("marble", f"there is one reward ({only}), so nothing to balance; leave marble out")
        barred = {"none": ("sum", "advantages"), "own": ("advantages",), "any": ()}[config.method.advantages]
        if self.mode in barred:
            text = f'"{self.mode}" sums scores or advantages, and objective "{config.method.name}" has none'
            raise Problem("marble.mode", text)
