"""D2-Align: a corrected direction in a reward's text space."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import FiniteFloat

from diffrl.config.base import NO_ROLLOUT, Method, PathText, Problem, Section, key
from diffrl.errors import nearest

if TYPE_CHECKING:
    from diffrl.config import Config


class D2AlignSection(Section):
    method = Method(
        "d2align",
        "D2-Align",
        {"D2-Align": "2512.24146"},
        about="correct a reward by a direction in its text space",
        kind="reward",
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
    embed: Literal["image", "reconstructed"] = key(
        "image",
        "what of an image is embedded: itself; reconstructed: noised to a random level of the schedule and predicted "
        "back in one step by the frozen model, as stage 2 sees it (the paper's Algorithm 1)",
    )
    pool: int = key(
        2048, "images of the frozen model, drawn and embedded once, that the steps draw from", "images", ge=1
    )

    def corrected(self, config: Config) -> str:
        """Name of the reward that is corrected."""
        return self.reward or next(iter(config.rewards))

    def plain(self, config: Config) -> dict[str, tuple[str, tuple[str, ...]]]:
        return {self.corrected(config): ("d2align reads its embeddings", ("cache", "offload", "column"))}

    def correct(self, rewards: dict[str, Any]) -> None:
        """Without its direction, which is learned later."""
        from diffrl.methods.d2align.corrected import Corrected

        name = self.reward or next(iter(rewards))
        rewards[name] = Corrected(rewards[name], self.omega, name=name)

    def build(self, build: Any) -> None:
        from diffrl.methods.d2align.stage1 import LearnedDirection

        build.add(LearnedDirection(build))

    def check(self, config: Config) -> None:
        from diffrl.rewards.registry import declares

        if config.method.rewards == "unused":
            raise Problem("d2align", f'corrects a reward, and objective "{config.method.name}" learns from none')
        if config.image_set is not None:
            raise Problem("d2align", NO_ROLLOUT)
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
