"""Back-propagation of differentiable rewards: D2-Align's stage 2, SRPO, R0, Ctrl-U."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import FiniteFloat

from diffrl.config.base import GIVEN, PAIR, Method, Problem, Sampling, Section, key

if TYPE_CHECKING:
    from diffrl.config import Config

BRANCHES = 2  # rows of a level under Direct-Align: the initial noise of both is the rollout's


class Align(Section):
    """Direct-Align: of each level a row that is denoised down to it, and one that is inverted up to it.

    Defaults: SRPO's released code for FLUX and HPS-v2.1 (its SRPO.py and SRPO_training_hpsv2.sh).
    """

    range: Annotated[tuple[FiniteFloat, FiniteFloat], PAIR] = key(
        (0.75, 0.964), "noise levels that are trained, drawn evenly: the early ones, which hack less"
    )


class Pair(Section):
    """SRPO's relative reward, with the words of its released code (SRPO.py)."""

    positive: list[str] = key(["Natural-lighting", "Detail", "Detailed", "Real"], "words for what is wanted")
    negative: list[str] = key(
        ["Concept art", "Painting", "Anime", "Flat", "Oil"], "words for what is not; each row draws one of both"
    )
    form: str = key("{word}. {prompt}", "how a word is put to a prompt, for the reward alone")

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


class Confidence(Section):
    """Ctrl-U's uncertainty, with the values of its released code for depth maps (train/ctrlu-depth.py)."""

    step: FiniteFloat = key(
        0.001, "how far above a row's level its second prediction is, in noise levels; the code: 1 of 1,000", gt=0, lt=1
    )
    scale: FiniteFloat = key(
        1.0, "u is the difference of both predictions' rewards, times their weights, over this", gt=0
    )
    price: FiniteFloat = key(0.1, "weight of u itself in the loss, so that it stays small; the code for masks: 1", ge=0)


class DirectSection(Section):
    method = Method(
        "direct",
        "direct back-propagation",
        {"D2-Align": "2512.24146"},
        options={
            ("align", GIVEN): {"SRPO": "2509.06942"},
            ("path", GIVEN): {"R0": "2503.13070"},
            ("cap", GIVEN): {"OneReward": "2508.21066"},
            ("confidence", GIVEN): {"Ctrl-U": "2410.11236"},
        },
        about="back-propagation of a differentiable reward, as in D2-Align",
        trainer="diffrl.methods.direct.objective:Direct",
        advantages="none",
        decodes=True,
        rewards="differentiable",
    )
    beta: FiniteFloat = key(0.0, "weight of mean (v_theta - v_ref)^2; 0 runs no reference forward", ge=0)
    timesteps: int = key(1, "trained timesteps per image, drawn from the sampling schedule", "timesteps", ge=1)
    guidance_scale: FiniteFloat = key(1.0, "guidance of the trained prediction; 1 is none", ge=1)
    decode_chunk: int | None = key(
        None,
        "images decoded and judged at a time, whose activations the backward pass recomputes: less memory, more time; "
        "null: a micro-batch at once, and all are kept",
        "images",
        ge=1,
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
        "a row whose reward, times its weight, is above this has no gradient (OneReward's lambda; SRPO's "
        "hinge: 0.7); null: all have one",
    )
    confidence: Confidence | None = key(
        None,
        "Ctrl-U: with cap, a row's loss counts exp(-u), u the disagreement of two predictions from neighbouring "
        "levels; present = on",
    )

    def trained_steps(self, rollout: Sampling) -> int:
        return self.timesteps * (BRANCHES if self.align else 1)

    def check(self, config: Config) -> None:
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
        if self.confidence is not None:
            self._check_confidence()

    def _check_confidence(self) -> None:
        where = "direct.confidence"
        for name in ("align", "path", "pair"):
            if getattr(self, name) is not None:
                raise Problem(where, f"is of one step from a noised image, not of direct.{name}: leave one out")
        if self.cap is None:
            text = "weighs a loss of at least 0: give direct.cap, the reward above which there is none"
            raise Problem(where, text)

    def _check_path(self, config: Config) -> None:
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

    def _check_align(self, align: Align, config: Config) -> None:
        low, high = align.range
        if not 0 <= low < high < 1:
            raise Problem("direct.align.range", f"expected two noise levels, 0 <= low < high < 1, got {low}, {high}")
        if config.d2align is not None and config.d2align.embed == "reconstructed":
            text = '"reconstructed" is from the schedule\'s levels, and direct.align trains at others: use image'
            raise Problem("d2align.embed", text)

    def _check_pair(self, pair: Pair, config: Config) -> None:
        from diffrl.rewards.registry import declares

        pair.check_forms()
        if self.align is None:
            raise Problem(
                "direct.pair", "its discounts run over direct.align.range; give direct.align, too ({} is SRPO's)"
            )
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
