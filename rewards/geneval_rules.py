"""GenEval's rules as pure functions of what a detector found: is what the prompt asks for in the image?

Ghosh et al. 2023 (arXiv:2310.11513) and its code. A prompt's metadata has `tag` (one of `TAGS`), `include`, a list of
clauses {class, count, color?, position?} that all must hold, and `exclude`, a list of {class, count} none of which may.
A box is (x0, y0, x1, y1) in pixels, y downwards.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Detection:
    """One object: its box, the detector's confidence in [0, 1], and its mask (H, W), bool, if the detector has one."""

    box: Box
    score: float
    mask: Tensor | None = None


@dataclass(frozen=True)
class Thresholds:
    """The published protocol's numbers; `overlap` 1 means that overlapping objects of a class are all kept."""

    score: float = 0.3
    counting: float = 0.9
    overlap: float = 1.0
    most: int = 16
    margin: float = 0.1


Objects = Mapping[str, Sequence[Detection]]
Colours = Callable[[Sequence[Detection], str], Sequence[str]]  # (objects, their class) to their colours


def iou(a: Box, b: Box, last: float = 1.0) -> float:
    """Intersection over union of two boxes, 0 for two without area. `last`: 1 where the last pixels are inside, as the
    published code counts them, 0 for boxes of real numbers."""

    def area(box: Box) -> float:
        return max(box[2] - box[0] + last, 0.0) * max(box[3] - box[1] + last, 0.0)

    shared = area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = area(a) + area(b) - shared
    return shared / union if union else 0.0


def filter_detections(
    candidates: Objects, tag: str, thresholds: Thresholds = Thresholds()
) -> dict[str, list[Detection]]:
    """The objects above the threshold (a higher one for counting), the most confident first, without overlaps."""
    least = thresholds.counting if tag == "counting" else thresholds.score
    objects = {}
    for name, detections in candidates.items():
        ordered = sorted((d for d in detections if d.score > least), key=lambda d: -d.score)
        chosen: list[Detection] = []
        for detection in ordered[: thresholds.most]:
            limit = thresholds.overlap
            if limit == 1 or all(iou(other.box, detection.box) < limit for other in chosen):
                chosen.append(detection)
        if chosen:
            objects[name] = chosen
    return objects


def relations(a: Box, b: Box, margin: float = 0.1) -> set[str]:
    """Where `a` is, seen from `b`: none, one or two of `RELATIONS`.

    The distance of the centres along an axis counts only beyond `margin` times the sum of both sizes; what is left,
    divided by the whole distance, must exceed 1/2.
    """
    offset, beyond = [], []
    for low, high in ((0, 2), (1, 3)):
        step = (a[low] + a[high]) / 2 - (b[low] + b[high]) / 2
        sizes = abs(a[high] - a[low]) + abs(b[high] - b[low])
        offset.append(step)
        beyond.append(math.copysign(max(abs(step) - margin * sizes, 0.0), step))
    if all(abs(value) < 1e-3 for value in beyond):
        return set()
    x, y = (value / math.hypot(*offset) for value in beyond)
    tests = (("left of", x < -0.5), ("right of", x > 0.5), ("above", y < -0.5), ("below", y > 0.5))
    return {name for name, true in tests if true}


def correct(objects: Objects, metadata: Mapping[str, Any], colours: Colours, margin: float = 0.1) -> bool:
    """GenEval's verdict. Of every class the `count` most confident objects are looked at, for colour and position."""
    right = True
    groups: list[Sequence[Detection] | None] = []  # the objects that met each clause, None if it was not met
    for clause in metadata.get("include", ()):
        name, count = clause["class"], int(clause["count"])
        chosen = list(objects.get(name, ()))[:count]
        met = len(chosen) == count
        if met and clause.get("color"):
            met = list(colours(chosen, name)).count(clause["color"]) >= count
        if met and clause.get("position"):
            met = _in_place(chosen, clause["position"], groups, margin)
        groups.append(chosen if met else None)
        right = right and met
    return right and all(len(objects.get(c["class"], ())) < int(c["count"]) for c in metadata.get("exclude", ()))


def partial_credit(objects: Objects, metadata: Mapping[str, Any], colours: Colours, margin: float = 0.1) -> float:
    """A reward in [0, 1] in the words of Flow-GRPO's paper (arXiv:2505.05470, section 4.1): the mean of clauses' parts.

    A clause has a part for its count, 1 - |found - asked| / asked, at least 0, and one for its colour or position (the
    share of the objects that have the colour; 1 or 0), which counts as 0 unless the number is exactly right.
    """
    parts: list[float] = []
    groups: list[Sequence[Detection] | None] = []
    for clause in metadata.get("include", ()):
        name, count = clause["class"], int(clause["count"])
        chosen = list(objects.get(name, ()))
        met = len(chosen) == count
        parts.append(max(1.0 - abs(len(chosen) - count) / count, 0.0))
        if clause.get("color"):
            share = list(colours(chosen, name)).count(clause["color"]) / count if met else 0.0
            parts.append(share)
            met = met and share == 1.0
        if clause.get("position"):
            met = met and _in_place(chosen, clause["position"], groups, margin)
            parts.append(float(met))
        groups.append(chosen if met else None)
    return sum(parts) / len(parts)


def flow_grpo_credit(objects: Objects, metadata: Mapping[str, Any], colours: Colours, margin: float = 0.1) -> float:
    """The reward that Flow-GRPO's server gives (`evaluate_reward` of yifan123/reward-server), faults included.

    Other than `partial_credit`: too many objects cost without end (16 of 1 asked for: -14), a position that is wrong
    appends 0 and then 1 all the same, and one that cannot be tried, its clause's colour being wrong, appends nothing.
    """
    parts: list[float] = []
    groups: list[Sequence[Detection] | None] = []
    for clause in metadata.get("include", ()):
        name, count = clause["class"], int(clause["count"])
        chosen = list(objects.get(name, ()))
        colour, position = clause.get("color"), clause.get("position")
        met = len(chosen) == count
        parts.append(1 - abs(count - len(chosen)) / count)
        if not met and (colour or position):
            parts.append(0.0)
        if met and colour:
            right = list(colours(chosen, name)).count(colour)
            parts.append(1 - abs(count - right) / count)
            met = right == count
        if met and position:
            met = _in_place(chosen, position, groups, margin)
            if groups[int(position[1])] is None:
                parts.append(0.0)
            else:
                parts += [1.0] if met else [0.0, 1.0]
        groups.append(chosen if met else None)
    return sum(parts) / len(parts)


def placed(objects: Objects, metadata: Mapping[str, Any], colours: Colours) -> list[tuple[Detection, bool]]:
    """The objects of the classes that are asked for, each with whether a clause is met by it: one of its class, and of
    its colour, that no surer object has met as often as is asked. Positions are of two objects, and left out."""
    rows: list[tuple[Detection, bool]] = []
    clauses = metadata.get("include", ())
    for name in dict.fromkeys(clause["class"] for clause in clauses):
        left: Counter[str | None] = Counter()
        for clause in clauses:
            if clause["class"] == name:
                left[clause.get("color")] += int(clause["count"])
        found = sorted(objects.get(name, ()), key=lambda thing: -thing.score)
        seen: Sequence[str | None] = colours(found, name) if found and set(left) != {None} else [None] * len(found)
        for thing, colour in zip(found, seen, strict=True):
            met = next((wanted for wanted in dict.fromkeys((colour, None)) if left[wanted] > 0), "none")
            left[met] -= 1
            rows.append((thing, met != "none"))
    return rows


def _in_place(
    chosen: Sequence[Detection], position: Sequence[Any], groups: Sequence[Sequence[Detection] | None], margin: float
) -> bool:
    """Whether all objects stand in the relation to all objects of the earlier clause that `position` names."""
    relation, target = position[0], groups[int(position[1])]
    if target is None:
        return False
    return all(relation in relations(a.box, b.box, margin) for a in chosen for b in target)


def parse_prompt(prompt: str, names: Sequence[str]) -> dict[str, Any] | None:
    """The metadata of a prompt in the words of GenEval's six templates, None for any other; `names`: the classes."""
    plurals = {f"{name}es" if name.endswith("s") else f"{name}s": name for name in names}
    text = prompt.strip().rstrip(".")
    if not text.startswith("a photo of "):
        return None
    text = text.removeprefix("a photo of ")
    number, _, plural = text.partition(" ")
    if number in NUMBERS[2:] and plural in plurals:
        name, count = plurals[plural], NUMBERS.index(number)
        more = {"class": name, "count": count + 1}
        return {"tag": "counting", "include": [{"class": name, "count": count}], "exclude": [more]}
    for relation in RELATIONS:
        sides = [_thing(side, names) for side in text.split(f" {relation} ")]
        if len(sides) == 2 and all(side is not None and "color" not in side for side in sides):
            first, second = sides
            assert first is not None
            return {"tag": "position", "include": [second, first | {"position": [relation, 0]}]}
    things = [_thing(side, names) for side in re.split(r" and (?=an? )", text)]
    if not 1 <= len(things) <= 2 or any(thing is None for thing in things):
        return None
    coloured = sum("color" in thing for thing in things if thing is not None)
    if coloured not in (0, len(things)):
        return None
    tags = ("single_object", "two_object") if coloured == 0 else ("colors", "color_attr")
    return {"tag": tags[len(things) - 1], "include": things}


def _thing(text: str, names: Sequence[str]) -> dict[str, Any] | None:
    """The clause of "a dog" or "an orange dog", None if it is neither."""
    article, _, rest = text.partition(" ")
    if article not in ("a", "an"):
        return None
    if rest in names:
        return {"class": rest, "count": 1}
    colour, _, name = rest.partition(" ")
    return {"class": name, "count": 1, "color": colour} if colour in COLORS and name in names else None
