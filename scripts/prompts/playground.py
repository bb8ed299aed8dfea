"""DivGenBench in the playground's language: all prompts of its four dimensions.

They are in rounds over their keywords, so that every beginning of them covers the keywords evenly. There are no more
than 912 different prompts of heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from diffrl.seeds import seed_of
from diffrl_playground.grammar import COLORS, NAMES, NUMBERS, SHAPES, STYLES, TONES, VALUES, Caption, possible
from scripts.prompts import Row, Splits

_GROUND: dict[str, Sequence[str]] = {"background": ("", *VALUES["background"])}


def splits() -> Splits:
    about = {name: ("", *VALUES[name]) for name in ("mood", "glasses", "hat")} | _GROUND
    heads = {
        f"{skin} skin, {hair} hair": _captions("heads", {"skin": skin, "hair": hair}, about)
        for skin, hair in itertools.product(VALUES["skin"], VALUES["hair"])
    }
    counted = {"shape": SHAPES, "color": COLORS, **_GROUND, "tone": ("", *TONES)}
    counts = {word: _captions("counts", {"count": str(n)}, counted) for word, n in NUMBERS.items()}
    return {
        "id": _rounds("id", heads),
        "style": _rounds("style", {style: _of_shapes({"style": style}) for style in STYLES}),
        "layout": _rounds("layout", counts),
        "tonal": _rounds("tonal", {tone: _of_shapes({"tone": tone}) for tone in TONES}),
    }


def _rounds(dimension: str, tables: dict[str, list[Caption]]) -> list[Row]:
    """Captions in rounds over their keywords, shuffled within each; as many rounds as the shortest list has."""
    columns = []
    for keyword, captions in tables.items():
        bits = np.random.PCG64(seed_of("divgen", dimension, keyword)).random_raw(len(captions))
        columns.append([(keyword, captions[i].text()) for i in np.argsort(bits, kind="stable")])
    rounds = zip(*columns, strict=False)
    return [(text, {"dimension": dimension, "keyword": keyword}) for row in rounds for keyword, text in row]


def _captions(kind: str, always: dict[str, str], options: dict[str, Sequence[str]]) -> list[Caption]:
    """All captions of a kind that say `always`, and of every option one of its values or nothing, if it has ""."""
    captions = []
    for values in itertools.product(*options.values()):
        attributes = always | {name: value for name, value in zip(options, values, strict=True) if value}
        caption = Caption(kind, {name: attributes[name] for name in NAMES[kind] if name in attributes})
        if possible(caption):
            captions.append(caption)
    return captions


def _of_shapes(attributes: dict[str, str]) -> list[Caption]:
    """Captions of one coloured thing, and of two in the shapes' order, with `attributes`; grounds free or not."""
    captions = _captions("objects", attributes, {"shape": SHAPES, "color": COLORS, **_GROUND})
    for first, second in itertools.combinations(SHAPES, 2):
        shapes = {"shape/1": first, "shape/2": second}
        captions += _captions("pairs", attributes | shapes, {"color/1": COLORS, "color/2": COLORS, **_GROUND})
    return captions
