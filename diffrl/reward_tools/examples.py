"""What a reward is tried on by `diffrl rewards check`: pictures of the playground, other shapes, unusual prompts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from diffrl.worlds import worlds

COUNT = 12
GENERAL = (
    'a shop sign that says "OPEN"',
    "a photo of a dog beside a red bench",
    "two cats left of a blue door",
    "a photo of a dog",  # this one and the next are GenEval's templates
    "a photo of two dogs",
)
SHAPES = ((64, 96), (96, 64), (57, 83), (200, 256))  # height and width
UNUSUAL = {
    "empty": "",
    "non-Latin": 'собака рядом с красной скамейкой, 一只红色的狗 "你好", कुत्ता 🐕',
    "long": "a photo of a dog beside a red bench, in the style of an old master, " * 40 + 'with the words "THE END"',
    "in quotes and braces": """it's {a} "dog" % $ \\ <|endoftext|> [ENC]""",
}


def example_images() -> tuple[Tensor, list[str]]:
    """Images (B, 3, 64, 64) in [0, 1] and prompts: the playground's of every kind, a third of them wrong, and noise."""
    import numpy as np

    world, rng = worlds()["playground"], np.random.default_rng(0)
    texts = world.sample(COUNT, rng)
    drawn = np.stack([world.draw(text, rng) for text in texts])
    images = torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 255
    images[::3] = images[::3].flip(0)  # every third picture is another prompt's: scores must differ between images
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(len(GENERAL), 3, 8, 8, generator=generator)
    blurred = interpolate(noise, images.shape[-2:], mode="bilinear", align_corners=False)
    return torch.cat([images, blurred]), [*texts, *GENERAL]
