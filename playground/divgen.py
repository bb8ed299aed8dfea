"""The playground's part of DivGenBench: prompts in its grammar, and extractors that read its images exactly."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from diffrl.divgen.extractors import NONE, Device, Found
from diffrl.divgen.prompts import shares, take
from diffrl.prompts import Prompt
from diffrl.seeds import seed_of

from .grammar import COLORS, NAMES, NUMBERS, SHAPES, STYLES, TONES, VALUES, Caption, possible
from .sight import SIZE, to_pixels
from .verifier import glance

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS = {"identity": "playground", "style": "clip", "layout": "playground", "features": "clip", "lpips": NONE}
_FEATURES = {name: VALUES[name] for name in NAMES["heads"] if name != "background"}
_GROUND: dict[str, Sequence[str]] = {"background": ("", *VALUES["background"])}


def benchmark(total: int) -> list[Prompt]:
    """The prompts of all four dimensions. There are no more than 912 different prompts of heads; the other dimensions
    share what the ID dimension lacks.
    """
    about = {name: ("", *_FEATURES[name]) for name in ("mood", "glasses", "hat")} | _GROUND
    heads = {
        f"{skin} skin, {hair} hair": _captions("heads", {"skin": skin, "hair": hair}, about)
        for skin, hair in itertools.product(_FEATURES["skin"], _FEATURES["hair"])
    }
    counted = {"shape": SHAPES, "color": COLORS, **_GROUND, "tone": ("", *TONES)}
    parts = [
        _rounds("id", heads),
        _rounds("style", {style: _of_shapes({"style": style}) for style in STYLES}),
        _rounds("layout", {word: _captions("counts", {"count": str(n)}, counted) for word, n in NUMBERS.items()}),
        _rounds("tonal", {tone: _of_shapes({"tone": tone}) for tone in TONES}),
    ]
    counts = shares(total, [len(parts[0]), total, total, total])
    return [prompt for part, count in zip(parts, counts, strict=True) for prompt in take(part, count)]


def _rounds(dimension: str, tables: dict[str, list[Any]]) -> list[Prompt]:
    """Captions in rounds over their keywords, shuffled within each; as many rounds as the shortest list has."""
    columns = []
    for keyword, captions in tables.items():
        bits = np.random.PCG64(seed_of("divgen", dimension, keyword)).random_raw(len(captions))
        columns.append([(keyword, captions[i].text()) for i in np.argsort(bits, kind="stable")])
    rows = zip(*columns, strict=False)
    return [Prompt(text, {"dimension": dimension, "keyword": keyword}) for row in rows for keyword, text in row]


def _captions(kind: str, always: dict[str, str], options: dict[str, Sequence[str]]) -> list[Any]:
    """All captions of a kind that say `always`, and of every option one of its values or nothing, if it has ""."""
    captions = []
    for values in itertools.product(*options.values()):
        attributes = always | {name: value for name, value in zip(options, values, strict=True) if value}
        caption = Caption(kind, {name: attributes[name] for name in NAMES[kind] if name in attributes})
        if possible(caption):
            captions.append(caption)
    return captions


def _of_shapes(attributes: dict[str, str]) -> list[Any]:
    """Captions of one coloured thing, and of two in the shapes' order, with `attributes`; grounds free or not."""
    captions = _captions("objects", attributes, {"shape": SHAPES, "color": COLORS, **_GROUND})
    for first, second in itertools.combinations(SHAPES, 2):
        shapes = {"shape/1": first, "shape/2": second}
        captions += _captions("pairs", attributes | shapes, {"color/1": COLORS, "color/2": COLORS, **_GROUND})
    return captions


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
