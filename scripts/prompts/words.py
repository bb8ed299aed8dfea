"""What the grammars share: the word lists, seeded choices, articles and numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from diffrl.seeds import Part, seed_of

T = TypeVar("T")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven")


@functools.cache
def words() -> dict[str, Any]:
    """The lists of words.yaml."""
    return yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))


@functools.cache
def plurals() -> dict[str, str]:
    """{class: its plural} of COCO's 80 classes, in their order."""
    pairs = [entry if isinstance(entry, dict) else {entry: f"{entry}s"} for entry in words()["objects"]]
    return {name: plural for pair in pairs for name, plural in pair.items()}


def an(text: str) -> str:
    """The text behind its indefinite article."""
    return f"{'an' if text[0].lower() in 'aeiou' else 'a'} {text}"


def one(name: str, colour: str = "") -> str:
    """One thing of a class, perhaps coloured: "a red dog", "a pair of red scissors", "a broccoli floret"."""
    plural = plurals()[name]
    single = f"{name} floret" if plural == f"{name} florets" else name
    painted = f"{colour} {single}".strip()
    return f"a pair of {painted}" if plural.startswith("pairs of ") else an(painted)


def none_of(name: str) -> str:
    """The class behind a "no": "dogs", "people", "scissors"."""
    return plurals()[name].removeprefix("pairs of ")


class Dice:
    """Seeded choices from raw bits, whose stream numpy keeps the same in all versions."""

    def __init__(self, *seed: Part) -> None:
        self._bits = np.random.PCG64(seed_of("prompt set", *seed))

    def below(self, count: int) -> int:
        """A number in [0, count); the bias is below count / 2^64."""
        return int(self._bits.random_raw()) % count

    def of(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def several(self, items: Sequence[T], count: int) -> list[T]:
        """Different ones, in random order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return [items[i] for i in np.argsort(self._bits.random_raw(len(items)), kind="stable")]


def held_out(key: Hashable, share: float, *seed: Part) -> bool:
    """Whether what a prompt asks for (`key`) belongs to the test split, which `share` of all keys do."""
    return seed_of("held out", *seed, repr(key)) < share * math.ldexp(1, 63)
