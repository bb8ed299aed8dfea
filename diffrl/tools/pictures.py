"""Pictures of files that others made, as RGB: right way up, on white where they let through; and grids of pictures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

# Of files that are taken for pictures in a folder: what Pillow reads, without documents, films and tables.
_KINDS = "png jpg jpeg webp bmp apng avif avifs dds dib gif icns ico j2c j2k jfif jp2 jpc jpe jpf jpx mpo pbm pcx pfm"
SUFFIXES = tuple(f".{kind}" for kind in f"{_KINDS} pgm pnm ppm psd qoi ras sgi tga tif tiff xbm xpm".split())
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
    if image.mode == "F" and (values := np.asarray(image)).max() <= 1:  # from 0 to 1, of which PIL makes black
        image = Image.fromarray((values.clip(0, 1) * 255).round().astype(np.uint8))
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    pixels = np.asarray(image.convert("RGBA")).astype(np.float32)
    alpha = pixels[:, :, 3:] / 255
    return (pixels[:, :, :3] * alpha + 255 * (1 - alpha)).round().astype(np.uint8)


def grid(pictures: Sequence[Image.Image], captions: Sequence[str], columns: int = 0, side: int = 192) -> Image.Image:
    """One picture of all, each in a frame with its caption's first two lines below, in rows of `columns`.

    `side`: pixels of a cell; smaller pictures are enlarged without smoothing, so that their pixels can be seen.
    `columns`: 0 for a grid that is about square.
    """
    columns = columns or max(math.ceil(math.sqrt(len(pictures))), 1)
    gap, text = 8, 34
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * (side + gap) + gap, rows * (side + gap + text) + gap), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = gap + i % columns * (side + gap), gap + i // columns * (side + gap + text)
        way = Image.Resampling.NEAREST if max(picture.size) < side else Image.Resampling.LANCZOS
        small = ImageOps.contain(picture, (side, side), way)
        sheet.paste(small, (left, top))
        pen.rectangle((left - 1, top - 1, left + small.width, top + small.height), outline=(200, 200, 200))
        lines = textwrap.wrap(caption, max(side // 7, 1), max_lines=2, placeholder=" ...")
        pen.multiline_text((left, top + small.height + 3), "\n".join(lines), fill="black", font=font, spacing=2)
    return sheet
