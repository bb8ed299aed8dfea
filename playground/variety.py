"""Variety, the gold measure of diversity: how much the pictures of one prompt differ in what the prompt leaves free.

For each free fact of a prompt (`scenes.free`: colours, styles, positions, a head's features ...) the chance that two
pictures of the prompt differ in it, over that of true renderings: 1 is as varied as the world, 0 is collapse. The
chance is the unbiased estimate from all pairs of a group, so it does not depend on the group's size (in expectation).
Pictures in which a fact cannot be read are left out of its pairs, and counted: never made a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .grammar import parse, understood
from .reading import observe
from .scenes import free
from .sight import to_pixels
from .verifier import glance


@dataclass(frozen=True)
class Tally:
    """One prompt's `shares`, fact -> chance of differing over that of true renderings; readings `tried`, `failed`."""

    shares: Mapping[str, float]
    tried: int
    failed: int


def tally(prompt: str, readings: Mapping[str, Sequence[str | None]]) -> Tally:
    """The prompt's part of the variety from free fact -> what each of its pictures shows (None: unreadable)."""
    shares: dict[str, float] = {}
    tried = failed = 0
    for name, possible in free(parse(prompt)).items():
        values, chance = readings[name], 1 / len(possible)
        read = [value for value in values if value is not None]
        tried, failed = tried + len(values), failed + len(values) - len(read)
        if len(read) >= 2:
            shares[name] = differing(read) / (1.0 - sum([chance * chance] * len(possible)))
    return Tally(shares, tried, failed)


Reading = dict[str, str | None]  # what a picture shows of each fact; None: unreadable


def shown(images: Any, prompts: Sequence[str]) -> list[Reading]:
    """What each image (as `verifier.verify` takes them) shows of each fact that its prompt leaves free.

    Raises ValueError for images of another form, a prompt that is not of the world, or lengths that differ.
    """
    values, pixels = [], to_pixels(images)
    if len(pixels) != len(prompts):
        raise ValueError(f"{len(pixels)} images but {len(prompts)} prompts")
    for seen, prompt in zip(glance(pixels), prompts, strict=True):
        caption = parse(prompt)
        reading = observe(seen, caption)
        values.append({name: reading.get(name) for name in free(caption)})
    return values


def differing(values: Sequence[str]) -> float:
    """Share of the pairs of `values` (two or more) that differ."""
    n = len(values)
    same = sum(count * (count - 1) for count in Counter(values).values())
    return 1.0 - same / (n * (n - 1))


class GroupVariety:
    """The variety of an evaluation's prompts as `diffrl.reward_kinds.figures.GroupFigures`: "variety" (1: as varied as
    the world, 0: collapse) and "unreadable", the share of free facts that could not be read.

    The sums: of the shares, how many those are, readings that failed, readings.
    """

    size = 4

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """To prompts of the world."""
        return understood(prompt) is not None

    def read(self, images: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[Reading]:
        return shown(images, prompts)

    def sums(self, prompt: str, readings: Sequence[Mapping[str, str | None]]) -> tuple[float, ...]:
        part = tally(prompt, {name: [one[name] for one in readings] for name in readings[0]})
        # A prompt's share in float32, as it has always been: figures of earlier runs stay comparable to the bit.
        return float(np.float32(sum(part.shares.values()))), len(part.shares), part.failed, part.tried

    def figures(self, sums: Sequence[float]) -> dict[str, float | None]:
        total, facts, failed, tried = sums
        return {"variety": total / facts if facts else None, "unreadable": failed / tried if tried else None}


FIGURES = GroupVariety()
