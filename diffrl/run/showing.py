"""Training images for people: the newest groups kept for the live page, and groups that are voted on.

Only chosen groups' images are brought together, one group at a time, as bytes; the main process writes and asks, the
others get its answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from diffrl.prompts import Prompt
from diffrl.records.groups import FOLDER, ImageGroup, keep_newest, write_groups
from diffrl.rewards.protocol import Answers, Asker

if TYPE_CHECKING:
    from diffrl.config import Config
    from diffrl.rewards.scoring import Scorer
    from diffrl.run.loop import Loop


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of 0 to count - 1, evenly spread."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


@dataclass
class Showing:
    """`kept`: how many groups of the newest epoch stay on the disk. `asked`: the rewards that people answer."""

    run_dir: Path
    kept: int
    asked: Mapping[str, Asker]
    notes: list[str] = field(default_factory=list)  # for the console, of the last epoch
    figures: dict[str, float | None] = field(default_factory=dict)

    def chosen(self, count: int) -> set[int]:
        """Which of an epoch's groups."""
        sizes = [self.kept, *(reward.groups for reward in self.asked.values())]
        return {group for size in sizes for group in evenly(count, size)}

    def __call__(
        self, loop: Loop, epoch: int, prompts: Sequence[Prompt], images: Mapping[int, Tensor], scores: Tensor
    ) -> Tensor:
        """`scores` (n, K) of this process with what people answered.

        images: (3, H, W) uint8 of this process's images by their global number, those in chosen groups and at least
        one.
        """
        size, mark = loop.settings.group_size, time.perf_counter()
        everything = loop.processes.gather(scores)
        table = {i: self._gathered(loop, i, prompts[i], images, everything) for i in sorted(self.chosen(len(prompts)))}
        main = loop.accelerator.is_main_process
        if self.kept and main:
            newest = [table[i] for i in evenly(len(prompts), self.kept)]
            write_groups(self.run_dir, FOLDER, epoch + 1, newest)
            keep_newest(self.run_dir, epoch + 1)
        self.notes, self.figures, scores = [], {}, scores.clone()
        for name, reward in self.asked.items():
            places = evenly(len(prompts), reward.groups)
            given = torch.zeros(len(places), size, device=loop.policy.device)
            if main:
                given += self._ask(loop, name, reward, epoch + 1, [table[i] for i in places])
            given = loop.processes.sum(given).cpu()
            column = everything[:, loop.scorer.names.index(name)].view(-1, size)  # NaN so far
            column[places] = given
            first = loop.processes.rank * len(scores)
            scores[:, loop.scorer.names.index(name)] = column.flatten()[first : first + len(scores)]
        loop.clock.add("reward", mark)
        return scores

    def _gathered(
        self, loop: Loop, number: int, prompt: Prompt, images: Mapping[int, Tensor], scores: Tensor
    ) -> ImageGroup:
        """A group whose images other processes may have drawn."""
        members = range(number * loop.settings.group_size, (number + 1) * loop.settings.group_size)
        blank = torch.zeros_like(next(iter(images.values())))
        pixels = torch.stack([images.get(i, blank) for i in members])
        if loop.processes.count > 1:
            pixels = loop.processes.sum(pixels.to(loop.policy.device)).cpu()
        columns = scores[list(members)].T.tolist()
        known = [[value if math.isfinite(value) else None for value in column] for column in columns]
        names = loop.scorer.names
        return ImageGroup(prompt.text, pixels, {n: c for n, c in zip(names, known, strict=True) if n not in self.asked})

    def _ask(self, loop: Loop, name: str, reward: Asker, epoch: int, groups: Sequence[ImageGroup]) -> Tensor:
        """(groups, m), NaN where nobody answered; on the main process."""

        def look(text: str) -> None:
            loop.status(text)
            loop.check()

        answers = reward.ask(self.run_dir, epoch, groups, look)
        if answers.note:
            self.notes.append(f'reward "{name}", epoch {epoch}: {answers.note}')
        self.figures |= {f"{name}/{key}": value for key, value in answers.figures.items()}
        self.figures |= {f"{name}/agreement/{key}": value for key, value in agreement(groups, answers).items()}
        rows = [[math.nan if value is None else value for value in row] for row in answers.scores]
        return torch.tensor(rows, device=loop.policy.device)


class Seen:
    """An epoch's images on this process, of which those in chosen groups are kept; of no epoch (`key`) none are."""

    def __init__(self, loop: Loop, key: int | str, prompts: Sequence[Prompt]) -> None:
        self.loop, self.key, self.prompts = loop, key, prompts
        self.showing = loop.showing if isinstance(key, int) else None
        self.chosen = set() if self.showing is None else self.showing.chosen(len(prompts))
        self.images: dict[int, Tensor] = {}

    def add(self, images: Tensor, start: int) -> None:
        """A batch (b, 3, H, W) in [0, 1], whose first image has the global number `start`."""
        if self.showing is None:
            return
        for number, image in enumerate(images, start):
            if number // self.loop.settings.group_size in self.chosen or not self.images:
                self.images[number] = (image.float().clamp(0, 1) * 255).round().byte().cpu()

    def answered(self, scores: Tensor) -> Tensor:
        """`scores` (n, K) with what people answered."""
        if self.showing is None or not isinstance(self.key, int):
            return scores
        return self.showing(self.loop, self.key, self.prompts, self.images, scores)


def agreement(groups: Sequence[ImageGroup], answers: Answers) -> dict[str, float | None]:
    """By reward: of the pairs that people have told apart, the share that it orders as they do, a tie counting half."""
    shares: dict[str, float | None] = {}
    for name in groups[0].scores if groups else ():
        results = []
        for group, asked in zip(groups, answers.scores, strict=True):
            known = [(a, b) for a, b in zip(asked, group.scores[name], strict=True) if a is not None and b is not None]
            for place, (mine, its) in enumerate(known):
                for other, that in known[place + 1 :]:
                    if abs(mine - other) > 1e-6:
                        results.append(0.5 if its == that else float((mine > other) == (its > that)))
        shares[name] = sum(results) / len(results) if results else None
    return shares


def build_showing(config: Config, run_dir: Path, scorer: Scorer) -> Showing | None:
    """None where nobody is shown anything."""
    asked = {name: cast(Asker, scorer.rewards[name]) for name in scorer.asking if name in config.rewards}
    kept = config.tracking.groups
    return Showing(run_dir, kept, asked) if kept or asked else None
