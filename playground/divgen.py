"""The playground's part of DivGenBench: prompts in its grammar, and extractors that read its images exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from diffrl.additions.prompt_sets import prompts
from diffrl.divgen.extractors import NONE, Device, Found
from diffrl.divgen.prompts import DIMENSIONS, shares, take
from diffrl.prompts import Prompt

from .grammar import NAMES, VALUES
from .sight import SIZE, to_pixels
from .verifier import glance

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS = {"identity": "playground", "style": "clip", "layout": "playground", "features": "clip", "lpips": NONE}
_FEATURES = {name: VALUES[name] for name in NAMES["heads"] if name != "background"}


def benchmark(total: int) -> list[Prompt]:
    """The prompts of all four dimensions, which `scripts/prompts` has written. No more than 912 different ones are of
    heads; the other dimensions share what the ID dimension lacks.
    """
    parts = [prompts("divgen_playground", dimension) for dimension in DIMENSIONS]
    counts = shares(total, [len(parts[0]), total, total, total])
    return [prompt for part, count in zip(parts, counts, strict=True) for prompt in take(part, count)]


class Head:
    """The verifier's attributes of a cartoon head, each one-hot: the cosine of two is the share on which they agree.

    (13,): 3 skins, 4 hairs, 2 moods, glasses or not, hat or not. Independent uniform heads have a mean cosine of
    (1/3 + 1/4 + 1/2 + 1/2 + 1/2) / 5 = 0.417.
    """

    name = "playground"

    def __init__(self, device: Device = "cpu") -> None:
        pass

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        return [None if seen.head is None else _one_hot(seen.head) for seen in glance(to_pixels(images))]


def _one_hot(head: Mapping[str, str]) -> np.ndarray:
    shown = [head[name] == value for name, values in _FEATURES.items() for value in values]
    return np.array(shown, np.float32)


class Boxes:
    """The verifier's boxes of all things in an image, in [0, 1]; None for an empty image."""

    name = "playground"

    def __init__(self, device: Device = "cpu") -> None:
        pass

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        layouts = [seen.layout for seen in glance(to_pixels(images))]
        return [np.array(boxes, np.float32) / SIZE if boxes else None for boxes in layouts]


EXTRACTORS = {"identity": Head, "layout": Boxes}
