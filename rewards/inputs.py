"""What the zoo's rewards share to check their arguments and to look at images, with a model or without one.

Shapes: B images, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError, nearest


def check_choice(key: str, value: str, known: Collection[str], reward: str) -> None:
    """UserError, in the reward's name and with the nearest one, if `value` is not among the `known`."""
    if value not in known:
        raise UserError(f'{reward}: unknown {key} "{value}"{nearest(value, known)}')


def to_bytes(images: Tensor) -> Tensor:
    """(..., H, W) in [0, 1] as uint8 on the CPU."""
    return (images.float().clamp(0, 1) * 255).round().to("cpu", torch.uint8)


def to_pictures(images: Tensor) -> list[Any]:
    """(B, 3, H, W) in [0, 1] as Pillow's pictures."""
    from PIL import Image

    return [Image.fromarray(pixels.numpy()) for pixels in to_bytes(images).permute(0, 2, 3, 1)]
