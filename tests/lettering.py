"""Rendered words in 5 fonts and 3 sizes, for the tests of the OCR reward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

FONTS = {
    "DejaVu Sans": "DejaVuSans.ttf",
    "DejaVu Serif": "DejaVuSerif.ttf",
    "DejaVu Sans Mono": "DejaVuSansMono.ttf",
    "STIX": "STIXGeneral.ttf",
    "Computer Modern": "cmr10.ttf",
}
SIZES = (20, 32, 56)  # pixels, as a font's size is given: capitals are about 0.7 of it
WORDS = ("OPEN", "coffee", "Exit", "STOP", "Library", "garden", "Hotel", "FRESH", "Welcome", "music", "Bakery", "TAXI")
PAPERS = ((255, 255, 255), (240, 220, 160), (30, 60, 90), (20, 20, 20))


def picture(word: str, font: str, size: int, rng: np.random.Generator, side: int | None) -> Tensor:
    """(3, H, W) in [0, 1]: the word, somewhere in a square of `side` pixels, or (None) cut out as a line."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / FONTS[font]
    drawn = ImageFont.truetype(str(path), size)
    left, top, right, bottom = drawn.getbbox(word)
    width, height = int(right - left), int(bottom - top)
    paper = PAPERS[rng.integers(len(PAPERS))]
    ink = (10, 10, 40) if sum(paper) > 384 else (250, 250, 235)
    edge = size // 4
    whole = (width + 2 * edge, height + 2 * edge) if side is None else (side, side)
    x, y = (
        int(rng.integers(edge, max(outer - inner - edge, edge) + 1))
        for outer, inner in zip(whole, (width, height), strict=True)
    )
    image = Image.new("RGB", whole, paper)
    ImageDraw.Draw(image).text((x - left, y - top), word, ink, drawn)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
