"""Training images for people: the newest groups kept for the live page, and groups that are voted on.

Only chosen groups' images are brought together, one group at a time, as bytes; the main process writes and asks, the
others get its answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from diffrl.methods.asking import Answers, Asker
from diffrl.methods.groups import FOLDER, ImageGroup, keep_newest, write_groups
from diffrl.objectives.advantages import ScoredBatch
from diffrl.process_state import unchanged_by
from diffrl.prompts import MixedStream, Prompt, PromptStream
from diffrl.rollout import Rollout
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook
from diffrl.run.source import Epoch, EpochSource, Rollouts


def linspace_indices(count: int, most: int) -> list[int]:
    """At most `most` of 0 to count - 1, evenly spread."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


class HumanFeedback(RunHook):
    """A source: what another one draws, shown to people and with their answers; nothing is shown before `begin`.

    Args:
        rollouts: draws the images, wherever in `source`.
        kept: how many groups of the newest epoch stay on the disk.
        asked: the rewards that people answer.
    """

    def __init__(
        self, source: EpochSource, rollouts: Rollouts, run_dir: Path, kept: int, asked: Mapping[str, Asker]
    ) -> None:
        self.source, self.rollouts, self.run_dir = source, rollouts, run_dir
        self.kept, self.asked = kept, dict(asked)
        self.active = False
        self._notes: list[str] = []  # for the console, of the last epoch
        self._figures: dict[str, float | None] = {}
        self._chosen: set[int] = set()  # of the epoch's groups; empty while none is drawn
        self._images: dict[int, Tensor] = {}  # (3, H, W) uint8 of this process, by their global number

    @property
    def stream(self) -> PromptStream | MixedStream:
        return self.source.stream

    def begin(self, epoch: int) -> None:
        self.active = True

    def chosen(self, count: int) -> set[int]:
        """Which of an epoch's groups."""
        sizes = [self.kept, *(reward.groups for reward in self.asked.values())]
        return {group for size in sizes for group in linspace_indices(count, size)}

    def __call__(self, epoch: int) -> Epoch:
        if not self.active:
            return self.source(epoch)
        self._images, self._chosen = {}, self.chosen(len(self.rollouts.stream.batch(epoch)))
        drawn = self.source(epoch)
        self._chosen = set()
        scores = drawn.scores
        final = scores if scores.ndim == 2 else scores[:, self._final]
        answered = self._answered(epoch, drawn.rollout.prompts, final)
        if scores.ndim == 2:
            return drawn._replace(scores=answered)
        scores = scores.clone()
        scores[:, self._final] = answered
        return drawn._replace(scores=scores)

    @property
    def _final(self) -> int:
        """The view that is the image itself."""
        credit = self.rollouts.objective.credit
        assert credit is not None, "without credit over the steps there is one view"
        return credit.plan(self.rollouts.spec).final(self.rollouts.spec)

    def on_images(self, images: Tensor, first: int) -> None:
        """Those in chosen groups are kept, and at least one, which tells how large they are."""
        if not self._chosen:
            return
        for number, image in enumerate(images, first):
            if number // self.rollouts.group_size in self._chosen or not self._images:
                self._images[number] = (image.float().clamp(0, 1) * 255).round().byte().cpu()

    def _answered(self, epoch: int, prompts: Sequence[Prompt], scores: Tensor) -> Tensor:
        """`scores` (n, K) of this process with what people answered."""
        processes, size, mark = self.rollouts.processes, self.rollouts.group_size, time.perf_counter()
        device, names = self.rollouts.policy.device, self.rollouts.scorer.names
        everything = processes.gather(scores)
        table = {i: self._gathered(i, prompts[i], everything) for i in sorted(self.chosen(len(prompts)))}
        main = processes.rank == 0
        if self.kept and main:
            newest = [table[i] for i in linspace_indices(len(prompts), self.kept)]
            write_groups(self.run_dir, FOLDER, epoch + 1, newest)
            keep_newest(self.run_dir, epoch + 1)
        self._notes, self._figures, scores = [], {}, scores.clone()
        for name, reward in self.asked.items():
            places = linspace_indices(len(prompts), reward.groups)
            given = torch.zeros(len(places), size, device=device)
            if main:
                given += self._ask(name, reward, epoch + 1, [table[i] for i in places])
            given = processes.sum(given).cpu()
            column = everything[:, names.index(name)].view(-1, size)  # NaN so far
            column[places] = given
            first = processes.rank * len(scores)
            scores[:, names.index(name)] = column.flatten()[first : first + len(scores)]
        self._images = {}
        processes.clock.add("reward", mark)
        return scores

    def _gathered(self, number: int, prompt: Prompt, scores: Tensor) -> ImageGroup:
        """A group whose images other processes may have drawn."""
        members = range(number * self.rollouts.group_size, (number + 1) * self.rollouts.group_size)
        blank = torch.zeros_like(next(iter(self._images.values())))
        pixels = torch.stack([self._images.get(i, blank) for i in members])
        if self.rollouts.processes.count > 1:
            pixels = self.rollouts.processes.sum(pixels.to(self.rollouts.policy.device)).cpu()
        columns = scores[list(members)].T.tolist()
        known = [[value if math.isfinite(value) else None for value in column] for column in columns]
        named = dict(zip(self.rollouts.scorer.names, known, strict=True))
        return ImageGroup(prompt.text, pixels, {n: column for n, column in named.items() if n not in self.asked})

    def _ask(self, name: str, reward: Asker, epoch: int, groups: Sequence[ImageGroup]) -> Tensor:
        """(groups, m), NaN where no person answered; on the main process."""
        monitor = self.rollouts.monitor

        def look(text: str) -> None:
            monitor.status(text)
            monitor.check()

        with unchanged_by(name):
            answers = reward.ask(self.run_dir, epoch, groups, look)
        if answers.note:
            self._notes.append(f'reward "{name}", epoch {epoch}: {answers.note}')
        self._figures |= {f"{name}/{key}": value for key, value in answers.figures.items()}
        self._figures |= {f"{name}/agreement/{key}": value for key, value in agreement(groups, answers).items()}
        rows = [[math.nan if value is None else value for value in row] for row in answers.scores]
        return torch.tensor(rows, device=self.rollouts.policy.device)

    def after_rollout(self, epoch: int, rollout: Rollout, scored: ScoredBatch) -> Mapping[str, float | None]:
        return self._figures

    def after_epoch(self, metrics: dict[str, Any]) -> Sequence[str]:
        return self._notes


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


def add_votes(build: Build) -> None:
    """`tracking.groups`, and rewards that people answer."""
    rewards = build.scorer.rewards
    asked = {name: cast(Asker, rewards[name]) for name in build.asked}
    build.add(HumanFeedback(build.source, build.rollouts, build.folder.path, build.config.tracking.groups, asked))
