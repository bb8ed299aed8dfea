"""Rewards that cost nothing, for measuring everything else: `file.py:Patch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.seeds import generator


class Patch:
    """A random weighting of the image's 4 x 4 colours."""

    name = "patch"

    def __init__(self, number: int = 0) -> None:
        self.weight = torch.randn(48, generator=generator("patch", number))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        return F.adaptive_avg_pool2d(images, 4).flatten(1) @ self.weight.to(images)
