"""How fast and how large cards are, by their vendors: for `diffrl doctor --gpu 4090`."""

from __future__ import annotations

import re
from typing import NamedTuple

from diffrl.errors import UserError, nearest


class Card(NamedTuple):
    """`rate`: the vendor's dense TFLOP/s in bf16, or fp16 where there is none; `memory`: GiB that are free at first."""

    rate: float
    memory: float


# From the vendors' data sheets: tensor cores without sparsity, sums in fp32. Memory: GB on the sheet, less what a
# driver keeps.
CARDS = {
    "t4": Card(65, 14.6),
    "v100": Card(125, 31.5),
    "a10": Card(125, 22.0),
    "l4": Card(121, 22.0),
    "3060": Card(25.3, 11.6),
    "3090": Card(71, 23.6),
    "4080": Card(97.5, 15.6),
    "4090": Card(165.2, 23.5),
    "5090": Card(209.5, 31.3),
    "a6000": Card(154.8, 47.4),
    "6000ada": Card(364.2, 47.4),
    "l40s": Card(362.1, 44.4),
    "a100": Card(312, 79.1),
    "h100": Card(989, 79.1),
    "h200": Card(989, 139.8),
    "b200": Card(2250, 178.0),
    "mi300x": Card(1307, 191.0),
}
# Of an H200's rate (27 November 2026, epochs without rewards): SD3.5 at 512 px 0.20 (gardo_ocr, 48 images), Qwen-Image
# at 512 px 0.34 (grpo_ocr, 16 images, 128 text tokens). No other card was measured: all are taken to reach as much.
REACHED = (0.20, 0.34)


def find_card(name: str) -> Card:
    """A card by its name, such as 4090, "RTX 4090", a100; UserError with the nearest for another one."""
    plain = re.sub(r"(nvidia|amd|geforce|instinct|rtx|[\s_-])", "", name.lower())
    if plain not in CARDS:
        raise UserError(
            f'doctor: --gpu "{name}": GiB of memory, or a card{nearest(plain, CARDS)}; cards: {", ".join(CARDS)}'
        )
    return CARDS[plain]
