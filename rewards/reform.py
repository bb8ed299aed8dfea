"""A preference model whose head is trained again on what the policy found that it overrates, after REFORM
(arXiv:2507.06419).

Shapes: B images, H x W pixels, D the width of an embedding, n pairs of a reference and an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.image_sets.latents import Pictures
from diffrl.image_sets.layouts import PREFERENCE
from diffrl.image_sets.reading import read_set
from diffrl.reward_kinds.learning import Learner
from diffrl.reward_tools.head import features
from diffrl_zoo.cards import card_of
from diffrl_zoo.learning_preference import Inputs, LearningPreference
from diffrl_zoo.references import stacks


class Preferences:
    """Pairs of pictures that people compared: of the playground's biased raters, or of an image set.

    `source`: "playground", or what `diffrl.image_sets` reads (of a row with more than two pictures, the best and the
    worst). UserError for a set without a pair, or without scores "preference".
    """

    def __init__(self, source: str) -> None:
        self.groups: list[Any] = []
        if source != "playground":
            images = read_set(source).of_size(2)
            images.check_column(PREFERENCE)
            self.groups = [group for group in images.groups if len(set(_numbers(group))) > 1]
            if not self.groups:
                raise UserError(f"{source}: no prompt has two pictures of which one is preferred")
        self._pictures = Pictures()

    def draw(self, key: int) -> tuple[str, Tensor, Tensor]:
        """A prompt with the better and the worse picture (3, H, W) in [0, 1], chosen by `key`."""
        if not self.groups:
            from diffrl_playground.renderer import render
            from diffrl_playground.taste import rated_pair

            rng = np.random.default_rng(key)
            caption, scenes, chance = rated_pair(rng)
            pair = [render(scene) for scene in (scenes if rng.random() < chance else scenes[::-1])]
            return caption.text(), *(_tensor(pixels) for pixels in pair)  # type: ignore[return-value]
        group = self.groups[key % len(self.groups)]
        numbers = _numbers(group)
        best, worst = (group.scores[PREFERENCE].index(pick(numbers)) for pick in (max, min))
        pair = [self._pictures.pixels(group.pictures[at], group.where) for at in (best, worst)]
        return group.prompt, *(_tensor(pixels) for pixels in pair)  # type: ignore[return-value]


def _numbers(group: Any) -> list[float]:
    return [value for value in group.scores[PREFERENCE] if not math.isnan(value)]


def _tensor(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255


class Reform(LearningPreference):
    """A preference model with a linear head on its embeddings, which learns from images that score above a reference
    of their prompt: what the policy found that the model overrates.

    The score is `s(x, c) + w . f` with `f = sqrt(D) [e_img, e_img * e_txt]`, and w begins at 0. After every epoch w
    takes at most `steps` steps of Adam on `-log sigma(better - worse)`: over the pairs that are ranked falsely and, for
    each training image, over a pair of `preferences` ("playground", or an image set), so that what people prefer is
    kept. It stops where no pair is ranked falsely. `reward`: clip, preference, pickscore, hpsv2, or an own one that
    embeds; `references`: as in `Adversarial`. All other parameters are the reward's own.
    """

    name = "reform"
    card = card_of(name)

    def __init__(
        self,
        reward: str = "preference",
        references: str = "playground",
        preferences: str = "playground",
        learning_rate: float = 1e-3,
        steps: int = 9,
        device: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(reward, references, steps, device, arguments)
        self.preferences = Preferences(preferences)
        width = features(*(self.base.embed_text([""]),) * 2).shape[1]
        head = nn.Linear(width, 1, bias=False).to(self.device)
        nn.init.zeros_(head.weight)
        self.learner = Learner(head, learning_rate, betas=(0.9, 0.999))

    def scores(self, inputs: Inputs, first: bool = False) -> Tensor:
        """(B,) of embeddings (B, D) of images and texts."""
        image, text = inputs
        head = self.learner.first if first else self.learner.module
        return self.base.score(image, text) + head(features(image, text) * image.shape[1] ** 0.5).squeeze(-1)  # type: ignore[no-any-return]

    def inputs(self, images: Tensor, prompts: Sequence[str]) -> Inputs:
        """The embeddings (B, D) of images and texts."""
        return self.base.embed_image(images), self.base.embed_text(prompts)

    def overtaken(self, gap: Tensor, mean: float) -> Tensor:
        """The pairs whose image scores above the reference."""
        return gap < 0

    @torch.no_grad()
    def observe(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], keys: Sequence[int]
    ) -> None:
        """Keep the embeddings of training images (B, 3, H, W), of a reference and of a pair of preferences for each."""
        super().observe(images, prompts, metadata, keys)
        texts, better, worse = zip(*(self.preferences.draw(key) for key in keys), strict=True)
        e_txt = self.base.embed_text(texts)
        pair = (torch.cat([self.base.embed_image(part) for part in stacks(side)]) for side in (better, worse))
        first, second = ((e_img, e_txt) for e_img in pair)
        self._beside.append((first, second))
