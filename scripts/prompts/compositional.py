"""Attributes bound to several objects, relations, two counts and negations: harder than GenEval's tasks, and judged by
the reward `geneval` with the same metadata ("kind" says which of the four it is).

No task of the test split is in the train split, and none of either is one of GenEval's own forms.
"""

from __future__ import annotations

from scripts.prompts import Row, Splits
from scripts.prompts.geneval import RELATIONS, clause, one_more
from scripts.prompts.words import NUMBERS, Dice, held_out, none_of, one, plurals, words

COUNTS = {"train": 6000, "test": 400}
PLACES = {"left of": "to the left of", "right of": "to the right of", "above": "above", "below": "below"}
NEGATIONS = ("{} but no {}", "{} without any {} in the picture", "{}, and no {} anywhere")  # plurals


def _things(dice: Dice, count: int) -> tuple[list[str], list[str]]:
    """Different classes, none a person, and different colours for them; an orange is not called orange."""
    names = dice.several([name for name in plurals() if name not in ("person", "orange")], count)
    return names, dice.several(words()["colours"], count)


def binding(dice: Dice) -> Row:
    """Three coloured things."""
    names, colours = _things(dice, 3)
    a, b, c = (one(name, colour) for name, colour in zip(names, colours, strict=True))
    include = [clause(name, color=colour) for name, colour in zip(names, colours, strict=True)]
    return f"{a}, {b} and {c}", {"tag": "color_attr", "include": include}


def relation(dice: Dice) -> Row:
    """Two coloured things, one beside the other."""
    (first, second), (colour, other) = _things(dice, 2)
    where = dice.of(list(RELATIONS))
    text = f"{one(first, colour)} {PLACES[where]} {one(second, other)}"
    include = [clause(second, color=other), clause(first, color=colour, position=[where, 0])]
    return text, {"tag": "position", "include": include}


def numbers(dice: Dice) -> Row:
    """Two counted classes."""
    names, _ = _things(dice, 2)
    counts = [dice.below(3) + 2, dice.below(3) + 1]
    text = [f"{NUMBERS[n]} {plurals()[name]}" if n > 1 else one(name) for name, n in zip(names, counts, strict=True)]
    pairs = list(zip(names, counts, strict=True))
    exclude = [one_more(*pair) for pair in pairs]
    return " and ".join(text), {"tag": "counting", "include": [clause(*pair) for pair in pairs], "exclude": exclude}


def negation(dice: Dice) -> Row:
    """A coloured thing, and one that must not be there."""
    (name, absent), (colour, _) = _things(dice, 2)
    if dice.below(3) == 0:
        absent = "person"
    text = dice.of(NEGATIONS).format(one(name, colour), none_of(absent))
    return text, {"tag": "negation", "include": [clause(name, color=colour)], "exclude": [clause(absent)]}


KINDS = {"binding": binding, "relation": relation, "numbers": numbers, "negation": negation}


def splits() -> Splits:
    """{"train", "test"}, the four kinds in turn."""
    dice = Dice("compositional")
    rows: Splits = {"train": [], "test": []}
    seen: set[str] = set()
    number = 0
    while any(len(rows[split]) < count for split, count in COUNTS.items()):
        kind = list(KINDS)[number % len(KINDS)]
        number += 1
        text, metadata = KINDS[kind](dice)
        text = dice.of(("a photo of {}", "{}", "a picture of {}")).format(text)
        classes = sorted(c["class"] for c in metadata["include"])  # so the test split's objects are together anew
        split = "test" if held_out((kind, classes), 0.1, "compositional") else "train"
        if text not in seen and len(rows[split]) < COUNTS[split]:
            seen.add(text)
            rows[split].append((text, {"kind": kind, **metadata}))
    return rows
