"""Maps of rewards with `maps = (h, w)`: a score by places of the image, whose mean over the places is the score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from diffrl.errors import UserError
from diffrl.rewards.kinds import Asked
from diffrl.rewards.protocol import Metadata, ability


def known_means(values: Tensor, size: tuple[int, int]) -> Tensor:
    """(..., *size): maps (..., H, W) as means over what is known of each cell; NaN where nothing is."""
    known = adaptive_avg_pool2d((~values.isnan()).to(values.dtype), size)
    return adaptive_avg_pool2d(values.nan_to_num(0.0), size) / known


class Spatial(Asked):
    """The option `spatial: true`: a scorer asks for maps and keeps them; called by itself, it says the reward's scores.

    Raises `UserError` for a reward without maps.
    """

    def __init__(self, reward: Any, asked: object, entry: object) -> None:
        super().__init__(reward)
        if (size := ability(reward, "maps")) is None:
            raise UserError("it declares no `maps`, (h, w) of its map; leave it out")
        self.size, self.width = tuple(size), math.prod(size)
        self._kept: list[Tensor] = []

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """(B,) of images (B, 3, H, W) in [0, 1]."""
        return self.reward(images, prompts, metadata)

    def ask(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> object:
        """Maps as rows (B, h w), to be checked; what is no map stays as it is."""
        cells = self.reward.map(images, prompts, metadata)
        known = isinstance(cells, Tensor) and tuple(cells.shape[1:]) == self.size
        return cells.flatten(1) if known else cells

    def scores(self, answers: Tensor) -> Tensor:
        """(B,), NaN where a map says nothing at all."""
        self._kept.append(answers.unflatten(1, self.size))
        return answers.nanmean(1)

    def take(self) -> Tensor | None:
        """Maps (N, h, w), in the order of the batches."""
        kept, self._kept = self._kept, []
        return torch.cat(kept) if kept else None
