"""Varied scenes without metadata, and DDPO's animals. A subject and a place of the test split are in no train prompt
together."""

from __future__ import annotations

from scripts.prompts import Splits
from scripts.prompts.words import Dice, an, held_out, words

COUNTS = {"train": 10000, "test": 600}
KINDS = ("people", "animals", "things", "views")


def scene(dice: Dice, kind: str) -> tuple[str, tuple[str, str]]:
    """(prompt, what decides its split)."""
    lists = words()["general"]
    style = dice.of(lists["styles"])
    if kind == "views":
        subject, rest = dice.of(lists["views"]), ""
        light = dice.of([light for light in lists["lights"] if light not in lists["lights_near"]])
        key = (subject, light)
    else:
        subject, place = dice.of(lists[kind]), dice.of(lists["places"])
        does = dice.of(lists[f"{kind}_do" if kind != "things" else "things_are"])
        rest = dice.of((f" {place}", f" {place}", f" {does} {place}", f" {does} {place}", f", {does}, {place}"))
        light = dice.of(lists["lights_indoors" if place in lists["indoors"] else "lights"])  # no snow in a library
        key = (subject, place)
    body = f"{subject}{rest}" + (f" {light}" if kind == "views" or dice.below(2) else "")
    forms = (body, f"{an(style)} of {body}", f"{body}, {style}", f"{style}: {body}")
    return dice.of(forms[kind == "views" :]), key


def splits() -> Splits:
    """{"train", "test"}, the four kinds in turn."""
    dice = Dice("general")
    rows: Splits = {"train": [], "test": []}
    seen: set[str] = set()
    number = 0
    while any(len(rows[split]) < count for split, count in COUNTS.items()):
        number += 1
        prompt, key = scene(dice, KINDS[number % len(KINDS)])
        split = "test" if held_out(key, 0.1, "general") else "train"
        if prompt not in seen and len(rows[split]) < COUNTS[split]:
            seen.add(prompt)
            rows[split].append((prompt, {}))
    return rows


def animals() -> Splits:
    """{"train", "test"} of "a photo of a cat"."""
    return {split: [(f"a photo of {an(name)}", {}) for name in names] for split, names in words()["animals"].items()}
