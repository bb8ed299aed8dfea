"""Reads a picture's facts, said or not: what the verifier's eyes see, under the names of the grammar and of the scenes.

`variety` counts how much these differ between the pictures of one prompt. And the verifier's answers by places, for
rewards with a map.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .grammar import NAMES, TWO_THINGS, Caption
from .scenes import HALVES, LARGE, QUARTERS, SIZE, SIZES, quarter_of
from .sight import without_holes
from .things import Thing
from .verifier import Observation, by_thing, judge


def observe(seen: Observation, caption: Caption) -> dict[str, str | None]:
    """What the picture shows of every fact of the caption's kind and of the places' bins (`scenes.free`), said or not.

    None where it cannot be read: the thing is none of the world's, or there are not as many as the kind needs.
    """
    names = NAMES[caption.kind]
    values: dict[str, str | None] = dict.fromkeys(names)
    values["background"] = seen.background
    if caption.kind == "heads":
        return values | (seen.head or {})
    if caption.kind == "words":
        word = seen.word
        if word is not None and word.text is not None:
            values["word"] = word.text
            values["color"] = _only(seen.things, "color")
            values["position"] = HALVES[word.y >= SIZE / 2]
        return values
    return values | _observed_things(seen, caption)


def _only(things: Sequence[Thing], name: str) -> str | None:
    """What all things have in common of `name`, or None."""
    values = {getattr(thing, name) for thing in things}
    return values.pop() if len(values) == 1 else None


def _observed_things(seen: Observation, caption: Caption) -> dict[str, str | None]:
    things = seen.things
    values = {name: _only(things, name) for name in ("style", "tone")}
    if caption.kind in TWO_THINGS:
        pair = _paired(things, caption)
        if pair is None:
            return values
        for i, thing in enumerate(pair, start=1):
            values |= {f"shape/{i}": thing.shape, f"color/{i}": thing.color}
        return values | {"relation": relation_of(*pair)}
    values |= {name: _only(things, name) for name in ("shape", "color")}
    if caption.kind == "objects" and len(things) == 1:
        values["position"] = quarter_of(things[0].x, things[0].y)
        values["size"] = SIZES[things[0].radius >= LARGE] if things[0].shape else None
    if caption.kind == "counts":
        values["count"] = str(len(things))
        quarters = {quarter_of(thing.x, thing.y) for thing in things}
        if len(quarters) == len(things) == int(caption.attributes["count"]):
            values["layout"] = " + ".join(q for q in QUARTERS if q in quarters)
    return values


def _paired(things: Sequence[Thing], caption: Caption) -> tuple[Thing, Thing] | None:
    """The two things in the order in which the caption names their shapes, or None."""
    if len(things) != 2:
        return None
    wanted = [caption.attributes.get(f"shape/{i}") for i in (1, 2)]
    for pair in (tuple(things), tuple(reversed(things))):
        if all(shape is None or shape == thing.shape for shape, thing in zip(wanted, pair, strict=True)):
            return pair  # type: ignore[return-value]
    return None


def relation_of(first: Thing, second: Thing) -> str:
    """Where the first lies from the second, on the axis on which they are farther apart."""
    right, down = first.x - second.x, first.y - second.y
    if abs(right) >= abs(down):
        return "right of" if right > 0 else "left of"
    return "below" if down > 0 else "above"


def region_map(seen: Observation, caption: Caption) -> np.ndarray:
    """(64, 64) float32 in [-1, 1]: on each thing and what it encloses, 2 p - 1 of the share p of its facts that hold,
    -1 on what the caption does not ask for; the ground 1 or -1 where the caption names it, else NaN. All is -1 where
    nothing is drawn.

    Of heads and words, whose facts have no places of their own, all that is drawn is one region.
    """
    verdict = judge(seen, caption)
    named = "background" in caption.attributes
    scores = np.full((SIZE, SIZE), 2.0 * verdict.strict["background"] - 1 if named else np.nan, np.float32)
    parts, answers = seen.view.parts, by_thing(seen, caption)
    if answers:
        for part, facts in zip(parts, [*answers, *[[False]] * (len(parts) - len(answers))], strict=True):
            scores[part.place][without_holes(part.member)] = 2 * sum(facts) / len(facts) - 1
    elif not parts:
        scores[:] = -1.0
    else:
        facts = [holds for name, holds in verdict.strict.items() if name != "background"]
        scores[seen.view.inked] = 2 * sum(facts) / len(facts) - 1 if facts else np.nan
    return scores
