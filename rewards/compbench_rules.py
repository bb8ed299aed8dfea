"""T2I-CompBench++'s rules, as pure functions of a prompt's words and of what a detector found: positions and counts.

Huang et al. 2025 (TPAMI; arXiv:2307.06350) and its scripts, faults included, so that numbers can be compared: "on top
of" is never right, since only "on the top of" is known; depth is read with x and y exchanged; in depth an overlap of
exactly a half counts as none; where a counted thing was not found under its name, every label with the name in it
becomes that thing, for the rest of the prompt, too.

Objects are (label, detection), the most confident first. A box is (x0, y0, x1, y1) in pixels of the picture as the
scripts see it (`seen_size`), y downwards. Words are (text, part of speech), as spaCy gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor

from diffrl_zoo import geneval_rules
from diffrl_zoo.geneval_rules import Box, Detection

Objects = Sequence[tuple[str, Detection]]
Words = Sequence[tuple[str, str]]
Pair = tuple[str, str]

NEAR = ("on side of", "next to", "near")
TOWARDS = {  # axis and sign of the way from the first thing to the second
    "on the left of": (0, 1),
    "on the right of": (0, -1),
    "on the bottom of": (1, -1),
    "on the top of": (1, 1),
}
RELATIONS = (*NEAR, *TOWARDS, "on top of")
DEPTHS = ("in front of", "behind", "hidden")
BETWEEN = ("on top of", "on bottom of", "on the left", "on the right", "next to", "on side of", "near")  # of two things
REACH = 150.0  # pixels
OVERLAP, OVERLAP_IN_DEPTH, ONE_THING = 0.1, 0.5, 0.9
iou = partial(geneval_rules.iou, last=0.0)  # of boxes of real numbers
LEAST = 0.5  # a lower score of a position is 0
SHORT, LONG = 479, 480  # pixels of the shorter side, and of the longer one at most
PEOPLE = ("boy", "girl", "man", "woman")
DETECTED_AS = {"ship": "boat", "telivision": "tv", "goldfish": "fish", "painting": "picture"}  # of counted things


def seen_size(height: int, width: int) -> tuple[int, int]:
    """The size (height, width) to which the scripts resize a picture before they detect."""
    short, long = SHORT, int(SHORT * max(height, width) / min(height, width))
    if long > LONG:
        short, long = int(LONG * short / long), LONG
    return (short, long) if height <= width else (long, short)


def relation_of(prompt: str, relations: Sequence[str]) -> str | None:
    """The first of the relations, in their order, that the prompt has anywhere."""
    return next((relation for relation in relations if relation in prompt), None)


def _detected(name: str) -> str:
    return "person" if name in PEOPLE else name


def pair_of(words: Words) -> Pair | None:
    """The first and the last noun of a simple prompt; None where it has none."""
    nouns = [text for text, kind in words if kind == "NOUN"]
    return (_detected(nouns[0]), _detected(nouns[-1])) if nouns else None


def pair_around(words: Words) -> Pair | None:
    """The nouns before and after the one relation of a complex prompt; None where these are not two."""
    things: list[str] = []
    for start in range(len(words)):
        lengths = (n for n in (3, 2, 1) if " ".join(text for text, _ in words[start : start + n]) in BETWEEN)
        if (length := next(lengths, None)) is None:
            continue
        before = [text for text, kind in words[:start] if kind in ("NOUN", "PROPN")]
        after = words[start + length :]
        nouns = [text for text, kind in after if kind == "NOUN"]
        names = [a[0] for a, b in pairwise(after) if a[1] == "PROPN" != b[1]]
        things += [*before[-1:], *(nouns or names)[:1]]
    return (_detected(things[0]), _detected(things[1])) if len(things) == 2 else None


def in_place(relation: str | None, a: Box, b: Box) -> float:
    """How well `a` stands in the relation to `b` in the plane, in [0, 1]."""
    way = tuple((b[low] + b[low + 2]) / 2 - (a[low] + a[low + 2]) / 2 for low in (0, 1))
    if relation in NEAR:
        near = min(map(abs, way)) < REACH
        return 1.0 if near else REACH / max(map(abs, way))
    axis, sign = TOWARDS.get(relation or "", (0, 0))
    if sign * way[axis] <= 0 or abs(way[axis]) <= abs(way[1 - axis]):
        return 0.0
    overlap = iou(a, b)
    return 1.0 if overlap < OVERLAP else OVERLAP / overlap


def in_depth(relation: str | None, a: Box, b: Box, depth: Tensor) -> float:
    """How well `a` stands in the relation to `b` in depth (H, W), where more is nearer; in [0, 1]."""
    if relation is None:
        return 0.0
    first, second = (depth[int(box[0]) : int(box[2]), int(box[1]) : int(box[3])].mean() for box in (a, b))
    nearer = float(first - second) if relation == "in front of" else float(second - first)
    overlap = iou(a, b)
    if not nearer > 0 or overlap == OVERLAP_IN_DEPTH:  # no pixels: not a number, which is not above 0
        return 0.0
    return min(overlap / OVERLAP_IN_DEPTH, 1.0)


def spatial(pair: Pair | None, relation: str | None, objects: Objects) -> float:
    """The score of a position in the plane: a quarter for each thing times its confidence, a half for the place."""
    chosen = [next((thing for label, thing in objects if label == name), None) for name in pair or ()]
    score = sum(0.25 * thing.score for thing in chosen if thing is not None)
    if chosen and None not in chosen:
        first, second = (thing.box for thing in chosen if thing is not None)
        score += in_place(relation, first, second) / 2
    return score if score >= LEAST else 0.0


def spatial_in_depth(pair: Pair | None, relation: str | None, objects: Objects, depth: Tensor) -> float:
    """The score of a position in depth; a thing is found where a label has its name in it."""
    if pair is None:
        return 0.0
    places = [[i for i, (label, _) in enumerate(objects) if name in label] for name in pair]
    if not all(places):
        return sum(0.25 * objects[some[0]][1].score for some in places if some)
    both = max(some[0] for some in places)  # here the second of the two is met; of each the last one up to here counts
    first, second = (objects[max(i for i in some if i <= both)][1] for some in places)
    return 0.25 * first.score + 0.25 * second.score + in_depth(relation, first.box, second.box, depth) / 2


def _one_thing(a: Box, b: Box) -> bool:
    """Whether two boxes of a label, whose last pixels are inside, are one thing: nearly equal, or one in the other."""
    width, height = (max(0.0, min(a[k + 2], b[k + 2]) - max(a[k], b[k]) + 1) for k in (0, 1))
    shared = width * height
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
    return any(shared / area > ONE_THING for area in (sum(areas) - shared, *areas))


def asked_names(names: Sequence[str]) -> list[str]:
    """Under which labels counted things are looked for."""
    return [_detected(DETECTED_AS.get(name, name)) for name in names]


def numeracy(names: Sequence[str], counts: Sequence[int], objects: Objects) -> float:
    """The score of counts: of each of the prompt's things half a share for one at least, half for the right number."""
    separate: list[tuple[str, Box]] = []
    for label, thing in objects:
        if not any(label == other and _one_thing(thing.box, box) for other, box in separate):
            separate.append((label, thing.box))
    labels, score, share = [label for label, _ in separate], 0.0, 1.0 / len(names)
    for name, count in zip(asked_names(names), counts, strict=True):
        if name not in labels:
            labels = [name if name in label else label for label in labels]
        if name in labels:
            score += 0.5 * share
            score += 0.5 * share * (labels.count(name) == count)
    return score
