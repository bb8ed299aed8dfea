"""Prompts of 3 to 10 atoms (counts, attributes, things, places, actions), each with a question about it, for the reward
`vlm` in mode questions: the idea of GenEval 2 (Kamath et al. 2025, arXiv:2512.16853), whose prompts, words and
questions are its own, and none of ours.

Metadata as GenEval 2's: `vqa_list` ([question, answer]), `skills` of the questions, and `atom_count`. A single thing
("a dog") has a question about its number, too, but its "a" is no atom.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from scripts.prompts import Row, Splits
from scripts.prompts.words import NUMBERS, Dice, an, held_out, plurals, words

COUNTS = {"train": 6000, "test": 400}
ATOMS = range(3, 11)
MOST = 3  # things of a prompt
NOT_ALONE = ("person", "skis", "scissors", "broccoli")  # their plurals are other words, or pairs
FORMS = ("a picture that shows {}", "a scene with {}", "{} in one picture", "an image of {}")

Asked = tuple[str, str, str]  # question, answer, skill


@dataclass(frozen=True)
class Thing:
    """Some of a class, perhaps with an attribute."""

    name: str
    count: int
    attribute: str

    @property
    def bare(self) -> str:
        return plurals()[self.name] if self.count > 1 else self.name

    @property
    def verb(self) -> str:
        return "are" if self.count > 1 else "is"

    @property
    def text(self) -> str:
        painted = f"{self.attribute} {self.bare}".strip()
        return f"{NUMBERS[self.count]} {painted}" if self.count > 1 else an(painted)

    @property
    def atoms(self) -> int:
        return 1 + (self.count > 1) + bool(self.attribute)

    def asked(self) -> list[Asked]:
        many = plurals()[self.name]
        asked = [(f"How many {many} does the picture show?", NUMBERS[self.count], "count")]
        if self.attribute:
            asked.append((f"{self.verb.capitalize()} the {self.bare} {self.attribute}?", "Yes", "attribute"))
        return [*asked, (f"Does the picture show any {many}?", "Yes", "object")]


def _prompt(dice: Dice) -> tuple[list[Thing], list[tuple[str, str]]]:
    """Different things, and between each two (a link, its skill): "and" has none."""
    lists, names = words()["atoms"], [name for name in plurals() if name not in NOT_ALONE]
    things, chosen = [], dice.several(names, 1 + dice.below(MOST))
    kinds = lists["alone"]  # GenEval 2 has numbers of one coloured thing, and of one of wood, metal, glass or plastic
    if len(chosen) > 1:
        kinds = [*words()["colours"], *lists["kinds"], *kinds]
    for name in chosen:
        count = 1 if dice.below(2) else 2 + dice.below(6)
        attribute = dice.of(kinds) if dice.below(3) else ""
        things.append(Thing(name, count, "" if attribute == name else attribute))
    links = []
    for thing in things[:-1]:
        skills = ["", "position", "position"] + ["verb"] * 2 * (thing.name in lists["animals"])
        skill = dice.of(skills)
        links.append((dice.of(lists["actions" if skill == "verb" else "places"]) if skill else "and", skill))
    return things, links


def _row(things: list[Thing], links: list[tuple[str, str]], form: str) -> Row:
    parts, asked = [things[0].text], things[0].asked()
    for (first, second), (link, skill) in zip(pairwise(things), links, strict=True):
        parts += [link, second.text]
        if skill:
            asked.append((f"{first.verb.capitalize()} the {first.bare} {link} the {second.bare}?", "Yes", skill))
        asked += second.asked()
    metadata = {
        "vqa_list": [[question, answer] for question, answer, _ in asked],
        "skills": [skill for _, _, skill in asked],
        "atom_count": _atoms(things, links),
    }
    return form.format(" ".join(parts)), metadata


def _atoms(things: list[Thing], links: list[tuple[str, str]]) -> int:
    return sum(thing.atoms for thing in things) + sum(bool(skill) for _, skill in links)


def splits() -> Splits:
    """{"train", "test"}, as many prompts of each number of atoms."""
    dice = Dice("atoms")
    rows: Splits = {"train": [], "test": []}
    full = {(split, atoms): count // len(ATOMS) for split, count in COUNTS.items() for atoms in ATOMS}
    seen: set[str] = set()
    while full:
        things, links = _prompt(dice)
        names = sorted(thing.name for thing in things)
        alone = () if len(names) > 1 else (things[0].attribute, things[0].count)
        place = ("test" if held_out((*names, *alone), 0.1, "atoms") else "train", _atoms(things, links))
        text, metadata = _row(things, links, dice.of(FORMS))
        if place in full and text not in seen:
            seen.add(text)
            rows[place[0]].append((text, metadata))
            full[place] -= 1
            if not full[place]:
                del full[place]
    return rows
