"""Pictures of files that others made, as RGB: right way up, whatever their depth, on white where they let through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import ImageOps

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 2**26  # of a picture, and of a batch of them: 800 MB as float32


def to_rgb(image: Image.Image) -> np.ndarray:
    """uint8 (H, W, 3). `Image.convert` alone cuts 16 bits off at white, and shows what transparent pixels hide.

    Raises what PIL raises for a damaged file, and ValueError for one of more than `MOST_PIXELS`, before it is unpacked.
    """
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels; a picture may have {MOST_PIXELS}")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits a channel, in an integer of 16 or 32
        grey = np.asarray(image).astype(np.int64).clip(0, 65535)
        return np.repeat(((grey + 128) // 257).astype(np.uint8)[:, :, None], 3, axis=2)
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    pixels = np.asarray(image.convert("RGBA")).astype(np.float32)
    alpha = pixels[:, :, 3:] / 255
    return (pixels[:, :, :3] * alpha + 255 * (1 - alpha)).round().astype(np.uint8)
