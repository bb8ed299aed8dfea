"""How fast and how large cards are, by their vendors (`cards.yaml`): for `diffrl doctor --gpu 4090`."""

from __future__ import annotations

import re
from typing import NamedTuple

from diffrl.errors import UserError, nearest
from diffrl.resources import table_beside


class Card(NamedTuple):
    """`rate`: the vendor's dense TFLOP/s in bf16, or fp16 where there is none; `memory`: GiB that are free at first."""

    rate: float
    memory: float


_TABLE = table_beside(__file__, "cards.yaml")
CARDS = {name: Card(*numbers) for name, numbers in _TABLE.items()}
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
