"""What a reward is tried on by `diffrl rewards check`: pictures of the playground, other shapes, unusual prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from diffrl.errors import UserError
from diffrl.rewards.protocol import Reward
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


def most_images(requests: int) -> tuple[int, int]:
    """(different images, images scored in all) of a check that may have `requests` scored: each as all are, as all are
    again, in another order and alone; and one of each unusual shape and prompt."""
    rest = len(SHAPES) + len(UNUSUAL)
    count = (requests - rest) // 4
    if count < 2:
        raise UserError(f"--requests: a check needs {rest + 8} or more")
    count = min(count, len(example_images()[1]))
    return count, 3 * count + min(COUNT, count) + rest


@dataclass
class Bench:
    """The reward and what it is tried on: images (B, 3, H, W) in [0, 1] with prompts to which it applies."""

    reward: Reward
    images: Tensor
    prompts: list[str]
    metadata: list[Mapping[str, Any]] = field(default_factory=list)
    offered: Sequence[tuple[str, Mapping[str, Any]]] = ()  # all prompts, also those to which it does not apply
    few: bool = False  # every image that is scored costs: a remote reward's
    kept: dict[str, Any] = field(default_factory=dict)

    def first(self) -> Any:
        """What the reward returned for all rows, when it was asked first, and how long it took."""
        if "first" not in self.kept:
            begun = time.perf_counter()
            self.kept |= {"first": self.raw(), "seconds": time.perf_counter() - begun}
        return self.kept["first"]

    def scores(self) -> Any:
        """`first`, on the CPU."""
        scores = self.first()
        return scores.detach().cpu().float() if isinstance(scores, Tensor) else scores

    def again(self) -> tuple[Tensor, bool]:
        """All scores a second time, and whether the call changed the images that it was given themselves."""
        if "again" not in self.kept:
            given = self.images.clone()
            with torch.no_grad():
                scores = self.reward(given, self.prompts, self.metadata)
            self.kept["again"] = (scores.detach().cpu().float(), not torch.equal(given, self.images))
        return self.kept["again"]

    def call(self, rows: Sequence[int] | None = None) -> Tensor:
        """Scores of the rows, on the CPU. Images are handed over as copies."""
        scores = self.raw(rows)
        return scores.detach().cpu().float() if isinstance(scores, Tensor) else scores

    def raw(self, rows: Sequence[int] | None = None) -> Tensor:
        """What the reward returns for the rows."""
        rows = range(len(self.prompts)) if rows is None else rows
        images = self.images[list(rows)].clone()
        with torch.no_grad():
            return self.reward(images, [self.prompts[i] for i in rows], [self.metadata[i] for i in rows])
