"""The playground's scenes: the whole truth of a picture, and the one distribution that it is drawn from.

A scene has a value for every fact of its kind, said or not, and the places of what is drawn. All facts are uniform over
their values and independent, but for this: two things differ in shape and in colour. So the distribution of what a
prompt leaves free is known exactly (`free`), and true pictures of a prompt are `render(complete(caption, rng))`.

Places are continuous; what can be read of them are bins, which are facts too, though no prompt says them: `position` of
a single thing (four quarters of the picture) and of a word (upper or lower half), `size` of a single thing, `layout` of
two or three things (which quarters they stand in).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .grammar import NAMES, RELATIONS, SPLITS, TWO_THINGS, VALUES, Caption, kind_of, pick, shares_of, stated_names

SIZE = 64
SET_LIMIT = 2000  # prompts of a set
REACH = 1.15  # how far the widest shape goes from its middle, in radii
EDGE = 1.5  # free pixels at the edge
OBJECT_RADII = (14.0, 21.0)
COUNT_RADII = (9.0, 11.0)
PAIR_RADII = (10.5, 12.0)
LARGE = sum(OBJECT_RADII) / 2  # a single thing of at least this radius is large
NEAR, FAR = 16.5, 47.5  # middles of the quarters of the picture
LETTER_HEIGHT = 24.0
QUARTERS = ("upper left", "upper right", "lower left", "lower right")
HALVES = ("upper", "lower")
SIZES = ("small", "large")
LAYOUTS = {n: tuple(" + ".join(cells) for cells in itertools.combinations(QUARTERS, int(n))) for n in VALUES["count"]}
_BINS: dict[str, dict[str, tuple[str, ...]]] = {
    "objects": {"position": QUARTERS, "size": SIZES},
    "words": {"position": HALVES},
    "pairs": {"relation": RELATIONS},
}
MIDDLES = {quarter: ((NEAR, FAR)[i % 2], (NEAR, FAR)[i // 2]) for i, quarter in enumerate(QUARTERS)}

_OTHER = {f"{name}/{i}": f"{name}/{j}" for name in ("shape", "color") for i, j in ((1, 2), (2, 1))}
_VALUES_OF = {name: VALUES[kind_of(name)] for names in NAMES.values() for name in names}

Place = tuple[float, float, float]


@dataclass(frozen=True)
class Scene:
    """What a picture shows. `facts`: a value for every name in NAMES[kind], and the bins of its places.

    `places`: (x, y, radius) of each thing, in pixels from the upper left corner; of a word the middle and the letters'
    height; of a head the middle and its unit (1 for a head of mean size).
    """

    kind: str
    facts: Mapping[str, str]
    places: tuple[Place, ...]

    def __getitem__(self, name: str) -> str:
        return self.facts[name]

    def things(self) -> list[tuple[str, str, Place]]:
        """(shape, colour, place) of every thing of a scene of shapes."""
        if self.kind in TWO_THINGS:
            return [(self[f"shape/{i}"], self[f"color/{i}"], place) for i, place in enumerate(self.places, start=1)]
        return [(self["shape"], self["color"], place) for place in self.places]

    def describe(self, names: tuple[str, ...]) -> Caption:
        """The caption that says the facts `names`."""
        return Caption(self.kind, {name: self.facts[name] for name in NAMES[self.kind] if name in names})


def free(caption: Caption) -> dict[str, tuple[str, ...]]:
    """The facts that a caption leaves free, by name: the values that it may have, all equally likely in true pictures
    of the caption.

    A fact with one possible value only (the layout of four things) is not among them.
    """
    attributes = caption.attributes
    facts = {name: _allowed(name, attributes) for name in NAMES[caption.kind] if name not in attributes}
    if attributes.get("count") in ("2", "3"):
        return facts | {"layout": LAYOUTS[attributes["count"]]}
    return facts | _BINS.get(caption.kind, {})


def _allowed(name: str, facts: Mapping[str, str]) -> tuple[str, ...]:
    """The values that a fact may have beside others: two things never share one."""
    other = facts.get(_OTHER.get(name, ""))
    return _VALUES_OF[name] if other is None else tuple(value for value in _VALUES_OF[name] if value != other)


def complete(caption: Caption, rng: np.random.Generator) -> Scene:
    """A scene that the caption describes; what it leaves free is drawn from the world's distribution by `rng`."""
    facts = _completed(NAMES[caption.kind], caption.attributes, rng)
    if caption.kind == "pairs":
        facts["relation"] = pick(rng, RELATIONS)
    places, bins = _placed(caption.kind, facts, rng)
    return Scene(caption.kind, facts | bins, places)


def _completed(names: Sequence[str], facts: Mapping[str, str], rng: np.random.Generator) -> dict[str, str]:
    """`facts`, and a random value for every other fact in `names`."""
    result = dict(facts)
    missing = [name for name in names if name not in result]
    for name, u in zip(missing, rng.random(len(missing)).tolist(), strict=True):
        values = _allowed(name, result)
        result[name] = values[int(u * len(values))]
    return result


def _placed(kind: str, facts: Mapping[str, str], rng: np.random.Generator) -> tuple[tuple[Place, ...], dict[str, str]]:
    """Places, and the facts that they make."""
    if kind == "objects":
        radius = float(rng.uniform(*OBJECT_RADII))
        margin = EDGE + REACH * radius
        x, y = (float(value) for value in rng.uniform(margin, SIZE - margin, 2))
        return ((x, y, radius),), {"position": quarter_of(x, y), "size": SIZES[radius >= LARGE]}
    if kind == "words":
        x, y = SIZE / 2 + float(rng.uniform(-1.0, 1.0)), SIZE / 2 + float(rng.uniform(-10.0, 10.0))
        return ((x, y, LETTER_HEIGHT),), {"position": HALVES[y >= SIZE / 2]}
    if kind == "heads":
        x, y = (float(value) for value in rng.uniform((30.5, 35.0), (33.5, 37.0)))
        return ((x, y, float(rng.uniform(0.95, 1.03))),), {}
    if kind == "counts":
        layout = pick(rng, LAYOUTS[facts["count"]])
        radius = float(rng.uniform(*COUNT_RADII))
        middles = [MIDDLES[quarter] for quarter in layout.split(" + ")]
        moves = rng.uniform(-1.5, 1.5, (len(middles), 2)).tolist()
        places = tuple((x + dx, y + dy, radius) for (x, y), (dx, dy) in zip(middles, moves, strict=True))
        return places, {"layout": layout} if facts["count"] != "4" else {}
    return _related(facts["relation"], rng), {}


def _related(relation: str, rng: np.random.Generator) -> tuple[Place, ...]:
    """Two things: one in each half of the picture on the axis of `relation`, about level on the other axis."""
    along = [float(middle + move) for middle, move in zip((NEAR, FAR), rng.uniform(-0.75, 0.75, 2), strict=True)]
    level = float(rng.uniform(22.0, 42.0))
    across = [level + float(move) for move in rng.uniform(-2.0, 2.0, 2)]
    if relation in ("right of", "below"):
        along.reverse()
    xs, ys = (along, across) if relation in ("left of", "right of") else (across, along)
    return tuple((x, y, float(rng.uniform(*PAIR_RADII))) for x, y in zip(xs, ys, strict=True))


def quarter_of(x: float, y: float) -> str:
    """The quarter of the picture that a place (in pixels) lies in, one of QUARTERS."""
    return QUARTERS[int(x >= SIZE / 2) + 2 * int(y >= SIZE / 2)]


def sample_caption(rng: np.random.Generator, split: str, subset: str = "all") -> Caption:
    """A random caption of a split and a subset; all its randomness comes from `rng`.

    "compositional" is objects, counts, pairs and relations; a kind's name is that kind; "styles" and "tones" are
    captions that say one. Raises ValueError for an unknown split or subset.
    """
    shares, must = shares_of(subset)
    if split not in SPLITS:
        raise ValueError(f"no playground split {split!r} (choose from: {', '.join(SPLITS)})")
    kinds = list(shares)
    kind = kinds[int(np.searchsorted(np.cumsum(list(shares.values())), rng.random() * sum(shares.values())))]
    while True:
        names = stated_names(kind, rng)
        if must and must not in names:
            continue
        caption = Caption(kind, _completed(names, {}, rng))
        if caption.split() == split:
            return caption


@functools.cache
def prompt_set(subset: str, split: str) -> tuple[str, ...]:
    """At most 2,000 distinct prompts of a subset and a split, always the same ones in the same (random) order."""
    seed = int.from_bytes(hashlib.sha256(f"{subset}/{split}".encode()).digest()[:8], "big")
    rng = np.random.default_rng(seed)
    prompts: dict[str, None] = {}
    misses = 0
    while len(prompts) < SET_LIMIT and misses < 60:  # so many in a row mean that (almost) all are found
        text = sample_caption(rng, split, subset).text()
        misses = misses + 1 if text in prompts else 0
        prompts[text] = None
    return tuple(prompts)
