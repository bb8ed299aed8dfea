"""DivGenBench's portraits and studio shots (D2-Align, arXiv 2512.24146), which no base prompt is part of.

Both are in rounds over their keywords, so that every beginning of them covers the keywords evenly.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from scripts.prompts import Row, Splits
from scripts.prompts.words import an

EACH = 800  # prompts of a dimension


@functools.cache
def keywords() -> dict[str, Any]:
    """The lists of divgen.yaml."""
    return yaml.safe_load(Path(__file__).with_name("divgen.yaml").read_text(encoding="utf-8"))


def splits() -> Splits:
    return {"id": portraits(EACH), "layout": studio_shots(EACH)}


def portraits(count: int) -> list[Row]:
    """Each attribute in turn, with the least used age, ethnicity and gender that it does not contradict."""
    lists = keywords()["id"]
    axes = {"age": lists["ages"], "ethnicity": lists["ethnicities"], "gender": lists["genders"]}
    used: Counter[tuple[str, str]] = Counter()
    seen: set[str] = set()
    rows: list[Row] = []
    for attribute, limits in itertools.islice(itertools.cycle(lists["attributes"].items()), count):
        people = list(itertools.product(*(limits.get(axis, values) for axis, values in axes.items())))
        features = [attribute, *(f"{attribute} and {second}" for second in lists["second"] if second != attribute)]
        free = [
            (rank, person)
            for rank, with_ in enumerate(features)
            for person in people
            if _portrait(person, with_) not in seen
        ]

        def crowd(choice: tuple[int, tuple[str, ...]]) -> tuple[int, int]:
            """One feature before two; then how often the words are used already, each list counted by its length."""
            words = zip(axes.items(), choice[1], strict=True)
            return choice[0], sum(len(values) * used[axis, word] for (axis, values), word in words)

        rank, person = min(free, key=crowd)
        text = _portrait(person, features[rank])
        seen.add(text)
        attributes = dict(zip(axes, person, strict=True))
        used.update(attributes.items())
        rows.append((text, {"dimension": "id", "keyword": attribute, **attributes}))
    return rows


def _portrait(person: Sequence[str], features: str) -> str:
    return f"a high-quality portrait photo of {an(' '.join(person))} with {features}"


def studio_shots(count: int) -> list[Row]:
    """Every number of every object, and then two different objects, since the paper's template has 320 fillings only.

    The keyword is the (first) object; "objects" has the names that a detector is asked for, with their numbers.
    """
    lists = keywords()["layout"]
    numbers, plurals = list(lists["numbers"].items()), list(lists["objects"].items())
    size, rows = len(plurals), []
    for i in range(count):
        turn, k = divmod(i, size)
        named = [(plurals[k], numbers[(turn + k) % len(numbers)])]
        if turn >= len(numbers):
            # A stride without a common factor with the number of objects: every object is second equally often.
            other = turn - len(numbers)
            second = plurals[(k + 1 + (7 * other) % (size - 1)) % size]
            named.append((second, numbers[(2 * turn + k + 1) % len(numbers)]))
        things = " and ".join(f"{word} {plural}" for (_, plural), (word, _) in named)
        objects = {name: number for (name, _), (_, number) in named}
        about = {"dimension": "layout", "keyword": plurals[k][0], "number": named[0][1][1], "objects": objects}
        rows.append((f"a studio shot of {things} on a clean white background", about))
    return rows
