"""Maps of rewards with `maps = (h, w)`: a score by places of the image, whose mean over the places is the score."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from diffrl.rewards.protocol import Reward, ability


def known_means(values: Tensor, size: tuple[int, int]) -> Tensor:
    """(..., *size): maps (..., H, W) as means over what is known of each cell; NaN where nothing is."""
    known = adaptive_avg_pool2d((~values.isnan()).to(values.dtype), size)
    return adaptive_avg_pool2d(values.nan_to_num(0.0), size) / known


class Maps:
    """What the rewards `names` said of batches, in the batches' order."""

    def __init__(self, names: Collection[str]) -> None:
        self._parts: dict[str, list[Tensor]] = {name: [] for name in names}

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    @staticmethod
    def width(reward: Reward) -> int:
        """Places of its map."""
        return math.prod(ability(reward, "maps"))

    @staticmethod
    def flat(reward: Any) -> Callable[..., object]:
        """Its map as rows (B, h w), to be checked; what is no map stays as it is."""

        def ask(*given: object) -> object:
            cells = reward.map(*given)
            known = isinstance(cells, Tensor) and tuple(cells.shape[1:]) == tuple(reward.maps)
            return cells.flatten(1) if known else cells

        return ask

    def add(self, name: str, reward: Reward, rows: Tensor) -> Tensor:
        """Keeps a batch's maps (B, h w), and says their scores (B,); NaN where a map says nothing at all."""
        self._parts[name].append(rows.unflatten(1, ability(reward, "maps")))
        return rows.nanmean(1)

    def take(self) -> dict[str, Tensor]:
        """(B, h, w) of each, of all images since this was last asked."""
        taken = {name: torch.cat(parts) for name, parts in self._parts.items() if parts}
        self._parts = {name: [] for name in self._parts}
        return taken
