"""Rewards that people answer while the run waits: what such a reward has beside its call, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diffrl.methods.groups import ImageGroup
from diffrl.rewards.kinds import Asked


@dataclass(frozen=True)
class Answers:
    """What people said of an epoch's groups: scores and standard errors of each group's m images, None where there is
    none; figures of the epoch by their names; `note`: a sentence for the console, or nothing."""

    scores: Sequence[Sequence[float | None]]
    errors: Sequence[Sequence[float | None]]
    figures: Mapping[str, float | None]
    note: str = ""


class Awaited(Asked):
    """`asks = True`: a scorer leaves its scores to the people whom the run asks."""

    when = "never"


class Asker(Protocol):
    """What a reward has beside `Reward` if people give its scores while the run waits. One process asks, for all.

    groups: how many of an epoch's groups are shown, at most.
    """

    groups: int

    def ask(self, run_dir: Path, epoch: int, groups: Sequence[ImageGroup], look: Callable[[str], None]) -> Answers:
        """Shows the groups and waits; `look` gets what is going on, often, and may raise."""
        ...

    def answered(self, run_dir: Path, epoch: int, groups: Sequence[ImageGroup]) -> Answers | None:
        """What the run went on with in this epoch; None if it was not asked about these very images. Only reads."""
        ...
