"""GenEval's six task types (Ghosh et al. 2023, arXiv 2310.11513), in its words and with its metadata.

Two prompts are the same task if their metadata ask for the same (`task_key`: the order of objects does not matter). No
task of the test split is in the train split, nor is one of the 553 of the published benchmark, of which only hashes
are shipped: who trains on geneval/train can report the benchmark. Train has Flow-GRPO's mixture (arXiv 2505.05470):
position 7, counting 5, two colours 3, one colour 1, two objects 1, single objects 0. Counting has few tasks (two to six
of a class), so each comes in several wordings.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.seeds import seed_of
from scripts.prompts import Row, Splits
from scripts.prompts.words import NUMBERS, Dice, an, plurals, words

RELATIONS = {"left of": "right of", "above": "below", "right of": "left of", "below": "above"}  # and its opposite
TEST = {"single_object": 80, "two_object": 120, "counting": 80, "colors": 100, "position": 120, "color_attr": 120}
SHARES = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
UNIT = 320  # train prompts of a share of 1
COUNTING = (
    "a photo of {}", "a picture of {}", "an image of {}", "a snapshot of {}", "a photo with exactly {}",
    "a photo that shows {}", "{} in one photo", "a close-up photo of {}",
)  # fmt: skip


def clause(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def one_more(name: str, count: int) -> dict[str, Any]:
    """What a counted class may not reach."""
    return clause(name, count + 1)


def single(name: str) -> Row:
    return f"a photo of {an(name)}", {"tag": "single_object", "include": [clause(name)]}


def two(first: str, second: str) -> Row:
    text = f"a photo of {an(first)} and {an(second)}"
    return text, {"tag": "two_object", "include": [clause(first), clause(second)]}


def counting(name: str, count: int, wording: str = COUNTING[0]) -> Row:
    include, exclude = [clause(name, count)], [one_more(name, count)]
    text = wording.format(f"{NUMBERS[count]} {plurals()[name]}")
    return text, {"tag": "counting", "include": include, "exclude": exclude}


def coloured(name: str, colour: str) -> Row:
    return f"a photo of {an(colour)} {name}", {"tag": "colors", "include": [clause(name, color=colour)]}


def two_coloured(first: tuple[str, str], second: tuple[str, str]) -> Row:
    """Of (class, colour)."""
    include = [clause(name, color=colour) for name, colour in (first, second)]
    text = " and ".join(an(f"{colour} {name}") for name, colour in (first, second))
    return f"a photo of {text}", {"tag": "color_attr", "include": include}


def position(first: str, relation: str, second: str) -> Row:
    include = [clause(second), clause(first, position=[relation, 0])]
    return f"a photo of {an(first)} {relation} {an(second)}", {"tag": "position", "include": include}


def task_key(metadata: Mapping[str, Any]) -> str:
    """What the prompt asks for, in one form: objects in alphabetic order, "right of" and "below" turned round."""
    clauses = metadata["include"]
    things = sorted(f"{c['count']} {c.get('color', '')} {c['class']}" for c in clauses)
    if metadata["tag"] == "position":
        (second, first), relation = (c["class"] for c in clauses), clauses[1]["position"][0]
        if relation in ("right of", "below"):
            first, relation, second = second, RELATIONS[relation], first
        things = [first, relation, second]
    return "|".join([metadata["tag"], *things])


def key_hash(metadata: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits of a task."""
    return f"{seed_of('geneval task', task_key(metadata)):016x}"[-10:]


def published() -> frozenset[str]:
    """Hashes of the published benchmark's tasks."""
    lines = Path(__file__).with_name("geneval_published.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(word for line in lines if not line.startswith("#") for word in line.split())


def _coloured_things() -> list[tuple[str, str]]:
    """(class, colour) of all that can be painted: no people, no orange orange."""
    return [(n, c) for n in plurals() if n != "person" for c in words()["colours"] if c != n]


def _tasks(dice: Dice) -> dict[str, Sequence[Row]]:
    """Every task of each type in random order; of the large types a sample that is large enough."""
    names, things = list(plurals()), _coloured_things()
    pairs = [dice.several(names, 2) for _ in range(6000)]
    couples = [(dice.of(things), dice.of(things)) for _ in range(6000)]
    return {
        "single_object": [single(name) for name in names],
        "two_object": [two(*pair) for pair in dice.shuffled(list(itertools.combinations(names, 2)))],
        "counting": [counting(name, n) for n in dice.shuffled(range(2, 7)) for name in dice.shuffled(names)],
        "colors": [coloured(*thing) for thing in dice.shuffled(things)],
        "position": [position(a, dice.of(list(RELATIONS)), b) for a, b in pairs],
        "color_attr": [two_coloured(a, b) for a, b in couples if a[0] != b[0] and a[1] != b[1]],
    }


def splits() -> Splits:
    """{"train", "test"}; each text once."""
    tasks = _tasks(Dice("geneval"))
    test: list[Row] = []
    for tag, count in TEST.items():
        fresh = {task_key(data): (text, data) for text, data in tasks[tag]}
        test += list(fresh.values())[:count]
    taken = {key_hash(data) for _, data in test} | published()
    train: list[Row] = []
    for tag, share in SHARES.items():
        free = {task_key(data): (text, data) for text, data in tasks[tag] if key_hash(data) not in taken}
        rows = list(free.values())
        if tag == "counting":
            counts = [(data["include"][0]["class"], data["include"][0]["count"]) for _, data in rows]
            rows = [counting(*what, wording) for wording in COUNTING for what in counts]
        train += rows[: share * UNIT]
    dice = Dice("geneval", "order")
    return {"train": dice.shuffled(train), "test": dice.shuffled(test)}
