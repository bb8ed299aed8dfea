"""The rows that a loop trains on, from an image set: in the place of a rollout, or beside one.

An objective is handed a `Rollout` and scores as ever: the latents are the encoder's, the scores the set's. Which groups
an epoch has is a function of seed and epoch, so a resumed run has no position to restore. Symbols: P prompts (groups)
of an epoch, of which P_s from the set, G images each, N = P G; n of them on this process.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.denoising import Trajectory
from diffrl.errors import UserError
from diffrl.image_sets.inversion import inverted_path
from diffrl.image_sets.latents import FOLDER, Latents
from diffrl.image_sets.layouts import Group
from diffrl.image_sets.reading import folder_of, read_set
from diffrl.prompts import MixedStream, Prompt, PromptStream
from diffrl.rollout import Rollout, own_texts
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook
from diffrl.run.source import Epoch, EpochSource, Rollouts
from diffrl.samplers import schedule
from diffrl.seeds import noise, seed_of

log = logging.getLogger("diffrl")


class ImageSetGroups:
    """The groups of a set that a config can use, and which of them an epoch has.

    `stream`: their prompts, one of each group, so that a text may come more than once.
    """

    def __init__(self, config: Config) -> None:
        assert config.image_set is not None, "the caller has looked"
        self.rival = config.image_set.rival
        self.size = 1 if self.rival else config.rollout.group_size
        images = read_set(config.image_set.source)
        fitting = config.image_set.fitting(images, self.size)
        if left := len(images.groups) - len(fitting.groups):
            why = "come again" if self.rival else f"have fewer than {self.size} pictures"
            log.warning("%s: %d prompts %s and are left out", images.source, left, why)
        # What is best where a group has more than one picture.
        self.weights = {name: reward.weight for name, reward in config.rewards.items()}
        self.groups: Sequence[Group] = fitting.groups
        prompts = [Prompt(group.prompt, group.metadata) for group in self.groups]
        count, self.seed = config.given_groups, seed_of(config.seed, "image set")
        if count > len(self.groups):
            text = f"{count} prompts of an epoch are from {images.source}, which has {len(self.groups)} of {self.size}"
            raise UserError(f"rollout.groups: {text} pictures or more")
        self.stream = PromptStream(prompts, count, self.seed)

    def members(self, epoch: int, index: int) -> Tensor:
        """(G,) of a group's pictures, in their order; drawn anew each epoch where it has more. With a rival (1,): the
        best, one of them where several are."""
        group = self.groups[index]
        count = len(group.pictures)
        if count == self.size:
            return torch.arange(count)
        order = noise((count,), [(self.seed, epoch, index, "members")])[0].argsort()
        if self.rival:
            values = [w * torch.tensor(group.scores[name]).nan_to_num(0.0) for name, w in self.weights.items()]
            return order[torch.stack(values).sum(0)[order].argmax()][None]
        return order[: self.size].sort().values


class Offline(RunHook):
    """A source: the set's groups, in the place of a rollout or beside what another source draws.

    Args:
        source: gives the rest of an epoch, where the set is a share of it.
        rollouts: whose policy, processes and numbers these are; draws what a set's pictures are compared with.
    """

    def __init__(self, config: Config, groups: ImageSetGroups, source: EpochSource, rollouts: Rollouts) -> None:
        assert config.image_set is not None, "the caller has looked"
        self.groups, self.source, self.rollouts, self.epochs = groups, source, rollouts, config.epochs
        self.share, self.drawn = config.image_set.share, bool(config.drawn_groups)
        cache = config.image_set.cache
        place = folder_of(config.image_set.source) / FOLDER if cache is None else Path(cache)
        self.latents = Latents(rollouts.policy, place)

    @property
    def stream(self) -> PromptStream | MixedStream:
        return MixedStream([self.source.stream, self.groups.stream]) if self.drawn else self.groups.stream

    def begin(self, epoch: int) -> None:
        """Encode what the epochs that are left use and no cache has, each group on one process."""
        processes, monitor = self.rollouts.processes, self.rollouts.monitor
        monitor.status("encoding pictures")
        needed = sorted({index for later in range(epoch, self.epochs) for index in self.groups.stream.batch(later)})
        missing = self.latents.missing([self.groups.groups[index] for index in needed])
        processes.accelerator.wait_for_everyone()  # all have looked before one writes
        rank, world = processes.rank, processes.count
        mine = missing[rank * len(missing) // world : (rank + 1) * len(missing) // world]
        self.latents.encode(
            mine, monitor.check, lambda count: monitor.status(f"encoding pictures, group {count}/{len(mine)}")
        )
        processes.accelerator.wait_for_everyone()

    def __call__(self, epoch: int) -> Epoch:
        if self.groups.rival:  # one is drawn for each prompt
            prompts = [self.groups.stream.prompts[index] for index in self.groups.stream.batch(epoch)]
            members = torch.ones(len(prompts), 1, dtype=torch.long)
            return self._against(self.rollouts.draw(prompts, f"{epoch}, rivals", members), self._given(epoch))
        if self.share == 1:
            return self._given(epoch)
        return self._merged(self.source(epoch), self._given(epoch))

    def _given(self, epoch: int) -> Epoch:
        """The set's share of an epoch, on this process."""
        policy, spec, size = self.rollouts.policy, self.rollouts.spec, self.groups.size
        indices = self.groups.stream.batch(epoch)
        prompts = [self.groups.stream.prompts[index] for index in indices]
        total, (rank, world) = len(indices) * size, (self.rollouts.processes.rank, self.rollouts.processes.count)
        first, end = rank * total // world, (rank + 1) * total // world
        latents, scores = [], []
        for place in range(first // size, -(-end // size)):
            group, members = self.groups.groups[indices[place]], self.groups.members(epoch, indices[place])
            here = members[max(first - place * size, 0) : end - place * size]
            latents.append(self.latents(group, here))
            table = torch.tensor([group.scores[name] for name in self.rollouts.scorer.names])  # (K, m)
            scores.append(table[:, here].T)
        number = torch.arange(first, end)
        rollout = Rollout(
            prompts=prompts,
            prompt_index=number // size,
            member=number % size,
            first=first,
            total=total,
            latents=torch.cat(latents).to(policy.device),
            images=None,
            cond=own_texts(policy, [prompt.text for prompt in prompts], number // size),
            trajectory=None,
            schedule=torch.tensor(schedule(policy, spec).tolist()),
            process=policy.process,
            spec=spec,
            guidance=spec.guidance_scale if policy.distilled_guidance else 1.0,
        )
        if self.rollouts.objective.keep_trajectory == "path":
            self.rollouts.monitor.status(f"inverting {end - first} pictures")
            batch, snapshot = self.rollouts.batch_size, self.rollouts.objective.samples_from
            with policy.uneven_forwards():
                rollout.trajectory = inverted_path(policy, rollout, batch, snapshot)
            rollout.forwards = (end - first) * spec.steps
        return Epoch(rollout, torch.cat(scores), torch.full((end - first, 1), torch.nan))

    def _merged(self, drawn: Epoch, given: Epoch) -> Epoch:
        """One epoch of two, the set's groups spread evenly over it: every process has as many of them, as the config's
        check sees to, and so has every optimiser step."""
        size, (one, other) = self.rollouts.group_size, (drawn[0], given[0])
        count, ours = len(one.prompts) + len(other.prompts), len(other.prompts)
        from_set = [(place + 1) * ours // count > place * ours // count for place in range(count)]
        order, local = _order(from_set, len(one.prompts)), len(one.member) + len(other.member)
        first = (one.first + other.first) // size
        mine = from_set[first : first + local // size]
        rows = (_order(mine, len(one.member) // size)[:, None] * size + torch.arange(size)).flatten()
        number = torch.arange(first * size, first * size + local)
        both = [*one.prompts, *other.prompts]
        prompts = [both[i] for i in order.tolist()]
        return _together(
            drawn,
            given,
            rows,
            prompts=prompts,
            prompt_index=number // size,
            member=number % size,
            first=first * size,
            total=count * size,
            cond=own_texts(self.rollouts.policy, [prompt.text for prompt in prompts], number // size),
        )

    def _against(self, drawn: Epoch, given: Epoch) -> Epoch:
        """Pairs of a set's picture, the first of its group, and an image that was drawn for the same prompt."""
        count = len(given[0].member)
        rows = torch.stack([count + torch.arange(count), torch.arange(count)], 1).flatten()
        first = 2 * given[0].first
        number = torch.arange(first, first + 2 * count)
        ours = {"prompt_index": number // 2, "member": number % 2, "first": first, "total": 2 * given[0].total}
        return _together(drawn, given, rows, **ours)


def _together(drawn: Epoch, given: Epoch, rows: Tensor, **ours: Any) -> Epoch:
    """One epoch of both, its images being `rows` (n,) of the drawn ones followed by the set's."""
    one, other = drawn[0], given[0]
    on = rows.to(one.latents.device)
    trajectory = one.trajectory
    if trajectory is not None and other.trajectory is not None:
        pairs = ((getattr(t, name) for t in (trajectory, other.trajectory)) for name in ("states", "t", "t_next"))
        states, t, t_next = (torch.cat(list(pair))[on] for pair in pairs)
        trajectory = Trajectory(states, t, t_next, log_prob=torch.zeros_like(t))
    latents = torch.cat([one.latents, other.latents])[on]
    forwards = one.forwards + other.forwards
    rollout = dataclasses.replace(one, latents=latents, trajectory=trajectory, forwards=forwards, **ours)
    unknown = given[2].expand(-1, drawn[2].shape[1])
    return Epoch(rollout, torch.cat([drawn[1], given[1]])[rows], torch.cat([drawn[2], unknown])[rows])


def _order(from_set: Sequence[bool], drawn: int) -> Tensor:
    """(P,) place of each group in the list of those that were drawn, `drawn` of them, followed by the set's."""
    mask = torch.tensor(from_set, dtype=torch.bool)
    return torch.where(mask, drawn + mask.cumsum(0) - 1, (~mask).cumsum(0) - 1)


def add_image_set(build: Build) -> None:
    """`image_set`: an epoch's groups, or a share of them, are a set's."""
    groups = ImageSetGroups(build.config)
    if not build.config.drawn_groups:
        build.rollouts.stream = groups.stream
    build.add(Offline(build.config, groups, build.source, build.rollouts))
