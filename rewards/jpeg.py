"""JPEG size as a reward: the toy task of DDPO, which shows in minutes that a set-up optimises what it is told to."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice, to_pictures

RANGES = {"compressibility": (float("-inf"), 0.0), "incompressibility": (0.0, float("inf"))}


class Jpeg:
    """Size of the image as a JPEG file in kB (1,000 bytes), negative for `compressibility`.

    `mode`: compressibility (smaller files are better) or incompressibility. `quality`: JPEG's, 1 to 95 (DDPO: 95).
    """

    name = "jpeg"
    card = card_of(name)

    def __init__(self, mode: str = "compressibility", quality: int = 95) -> None:
        check_choice("mode", mode, RANGES, "jpeg")
        if not 1 <= quality <= 95:
            raise UserError(f"jpeg: quality is {quality}, not from 1 to 95")
        self.sign, self.quality = (-1.0 if mode == "compressibility" else 1.0), quality
        self.card = replace(type(self).card, range=RANGES[mode])

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Sizes (B,) in kB of images (B, 3, H, W) in [0, 1]."""
        sizes = []
        for picture in to_pictures(images):
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=self.quality)
            sizes.append(self.sign * file.tell() / 1000)
        return torch.tensor(sizes)
