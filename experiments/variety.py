"""The variety of any images of the playground as one figure, and by kind of fact: what experiments report of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffrl_playground.grammar import kind_of
from diffrl_playground.variety import shown, tally


@dataclass(frozen=True)
class Variety:
    """`value`: mean over the free facts of all prompts, or None if no pair could be read. `by_fact`: the same for each
    kind of fact. `unreadable`: share of the readings that failed, in [0, 1]. `readings`: how many were tried.
    """

    value: float | None
    by_fact: Mapping[str, float]
    unreadable: float
    readings: int


def variety(images: Any, prompts: Sequence[str]) -> Variety:
    """The variety of images (as `verifier.verify` takes them), one prompt each; images of equal prompts are a group.

    Raises ValueError for images of another form, a prompt that is not of the world, or lengths that differ.
    """
    table: dict[str, dict[str, list[str | None]]] = {prompt: {} for prompt in prompts}
    for prompt, reading in zip(prompts, shown(images, prompts), strict=True):
        for name, value in reading.items():
            table[prompt].setdefault(name, []).append(value)
    return variety_of_readings(table)


def variety_of_readings(table: Mapping[str, Mapping[str, Sequence[str | None]]]) -> Variety:
    """Variety from prompt -> free fact -> what each picture shows."""
    shares: dict[str, list[float]] = {}
    tried = failed = 0
    for prompt, readings in table.items():
        part = tally(prompt, readings)
        tried, failed = tried + part.tried, failed + part.failed
        for name, share in part.shares.items():
            shares.setdefault(kind_of(name), []).append(share)
    every = [share for readings in shares.values() for share in readings]
    return Variety(
        value=sum(every) / len(every) if every else None,
        by_fact={name: sum(readings) / len(readings) for name, readings in sorted(shares.items())},
        unreadable=failed / tried if tried else 0.0,
        readings=tried,
    )
