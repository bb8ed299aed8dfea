"""T2I-CompBench++ (Huang et al. 2025, TPAMI; arXiv:2307.06350): eight categories of 300 prompts, judged by kind.

A complex prompt's score is the mean of what its kind has: attributes with positions, attributes with actions, or all
three, by the lists of the two kinds that lie beside its file. Which things a prompt of numeracy counts is read here, by
the official list of nouns; what its judges detect is scored by the reward `compbench`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, read_text

from .items import Answers, Item, Mark, find

NOUNS = "new_objects.txt"
OWED = {
    "color": ("blip_vqa",),
    "shape": ("blip_vqa",),
    "texture": ("blip_vqa",),
    "spatial": ("unidet_2d",),
    "3d_spatial": ("unidet_3d",),
    "numeracy": ("unidet_count",),
    "non_spatial": ("clip",),
    "complex": ("blip_vqa", "unidet_2d", "clip_plain"),
}
KINDS = {"spatial": ("unidet_2d", "blip_vqa"), "action": ("clip_plain", "blip_vqa")}  # of complex prompts
NUMBERS = ("a", "an", "one", "two", "three", "four", "five", "six", "seven", "eight")
ONE = NUMBERS[:3]
WORD = re.compile(r"\w+(?:-\w+)*|[^\w\s]")  # as spaCy splits the official prompts

Nouns = Sequence[tuple[str, str]]  # singular and plural


def nouns_of(path: Path) -> Nouns:
    """The official nouns, a line each: "SINGULAR - PLURAL"."""
    nouns = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        one, dash, many = (part.strip().lower() for part in line.partition(" - "))
        if not (one and dash and many):
            raise UserError(f'{path}:{number}: expected "SINGULAR - PLURAL", got "{line[:60]}"')
        nouns.append((one, many))
    return nouns


def counted(text: str, nouns: Nouns) -> tuple[list[str], list[int]]:
    """The things that a prompt counts, in the singular, and how many of each: a noun of one or two words right after
    its number."""
    words, names, counts = WORD.findall(text), [], []
    for i, number in enumerate(words):
        after = (" ".join(words[i + 1 : i + 3]), words[i + 1]) if i + 1 < len(words) else ()
        noun = next((noun for noun in after if any(noun in forms for forms in nouns)), None)
        if number not in NUMBERS or noun is None:
            continue
        names.append(next((one for one, many in nouns if noun == (one if number in ONE else many)), noun))
        counts.append(1 if number in ONE else NUMBERS.index(number) - 1)
    return names, counts


def _lines(folder: Path, name: str) -> list[str]:
    path = find(folder, f"examples/dataset/{name}.txt", f"dataset/{name}.txt", f"{name}.txt")
    return [line.strip() for line in read_text(path).split("\n") if line.strip()]


def _plain(text: str) -> str:
    """As the official script compares: up to the first full stop, in small letters."""
    return text.split(".")[0].lower()


def read(folder: Path) -> list[Item]:
    kinds = {kind: {_plain(line) for line in _lines(folder, f"complex_val_{kind}")} for kind in KINDS}
    nouns = nouns_of(find(folder, f"examples/dataset/{NOUNS}", f"dataset/{NOUNS}", NOUNS))
    items = []
    for category, judges in OWED.items():
        for text in _lines(folder, f"{category}_val"):
            data: dict[str, Any] = {"category": category}
            if category == "numeracy":
                data["objects"], data["counts"] = counted(text, nouns)
            if category == "complex":
                data["kind"] = next((kind for kind in KINDS if _plain(text) in kinds[kind]), "both")
            items.append(Item(text, data, dict.fromkeys(judges, 1)))
    return items


def marks(item: Item, answers: Answers) -> Iterator[Mark]:
    used = KINDS.get(item.metadata.get("kind", ""), tuple(item.owed))
    for values in zip(*(answers[judge] for judge in used), strict=True):
        yield "Category", item.metadata["category"], sum(value for (value,) in values) / len(used)
