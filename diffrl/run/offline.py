"""The rows that a loop trains on, from an image set: in the place of a rollout, or beside one.

An objective is handed a `Rollout` and scores as ever: the latents are the encoder's, the scores the set's. Which groups
an epoch has is a function of seed and epoch, so a resumed run has no position to restore. Symbols: P prompts (groups)
of an epoch, of which P_s from the set, G images each, N = P G; n of them on this process.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.image_sets.latents import FOLDER, Latents
from diffrl.image_sets.layouts import Group
from diffrl.image_sets.reading import folder_of, read_set
from diffrl.policy import Conditioning, Policy
from diffrl.prompts import Prompt, PromptStream
from diffrl.rollout import Rollout
from diffrl.run.loop import Loop
from diffrl.samplers import schedule
from diffrl.seeds import noise, seed_of

log = logging.getLogger("diffrl")
Epoch = tuple[Rollout, Tensor, Tensor]  # with scores (n, K) and features (n, F), NaN of images that were not drawn


class Groups:
    """The groups of a set that a config can use, and which of them an epoch has.

    `stream`: their prompts, one of each group, so that a text may come more than once.
    """

    def __init__(self, config: Config) -> None:
        assert config.image_set is not None, "the caller has looked"
        self.size = config.rollout.group_size
        images = read_set(config.image_set.source)
        fitting = images.of_size(self.size)
        if left := len(images.groups) - len(fitting.groups):
            log.warning("%s: %d prompts have fewer than %d pictures and are left out", images.source, left, self.size)
        self.groups: Sequence[Group] = fitting.groups
        prompts = [Prompt(group.prompt, group.metadata) for group in self.groups]
        count, self.seed = config.groups_of_set, seed_of(config.seed, "image set")
        if count > len(self.groups):
            text = f"{count} prompts of an epoch are from {images.source}, which has {len(self.groups)} of {self.size}"
            raise UserError(f"rollout.groups: {text} pictures or more")
        self.stream = PromptStream(prompts, count, self.seed)

    def members(self, epoch: int, index: int) -> Tensor:
        """(G,) of a group's pictures, in their order; drawn anew each epoch where it has more."""
        count = len(self.groups[index].pictures)
        if count == self.size:
            return torch.arange(count)
        return noise((count,), [(self.seed, epoch, index, "members")])[0].argsort()[: self.size].sort().values


class Offline:
    """A loop's source: `epoch` to its rollout, scores and features, as `Loop._rollout` gives them.

    `columns`: the set's scores, in the order of the loop's. `loop`: whose own rollout gives the rest of an epoch.
    """

    def __init__(self, config: Config, policy: Policy, groups: Groups, loop: Loop) -> None:
        assert config.image_set is not None, "the caller has looked"
        self.policy, self.groups, self.loop, self.share = policy, groups, loop, config.image_set.share
        self.columns = [config.image_set.column(name) for name in loop.scorer.names]
        cache = config.image_set.cache
        self.latents = Latents(policy, folder_of(config.image_set.source) / FOLDER if cache is None else Path(cache))

    def prepare(
        self, epochs: range, accelerator: Accelerator, check: Callable[[], None], status: Callable[[str], None]
    ) -> None:
        """Encode what these epochs use and no cache has, each group on one process; all of them call it."""
        needed = sorted({index for epoch in epochs for index in self.groups.stream.batch(epoch)})
        missing = self.latents.missing([self.groups.groups[index] for index in needed])
        accelerator.wait_for_everyone()  # all have looked before one writes
        rank, world = accelerator.process_index, accelerator.num_processes
        mine = missing[rank * len(missing) // world : (rank + 1) * len(missing) // world]
        self.latents.encode(mine, check, lambda count: status(f"encoding pictures, group {count}/{len(mine)}"))
        accelerator.wait_for_everyone()

    def __call__(self, epoch: int) -> Epoch:
        if self.share == 1:
            return self._given(epoch)
        return self._merged(self.loop._rollout(epoch), self._given(epoch))

    def _given(self, epoch: int) -> Epoch:
        """The set's share of an epoch, on this process."""
        policy, spec, size = self.policy, self.loop.spec, self.groups.size
        indices = self.groups.stream.batch(epoch)
        prompts = [self.groups.stream.prompts[index] for index in indices]
        total, (rank, world) = len(indices) * size, (self.loop.processes.rank, self.loop.processes.count)
        first, end = rank * total // world, (rank + 1) * total // world
        latents, scores = [], []
        for place in range(first // size, -(-end // size)):
            group, members = self.groups.groups[indices[place]], self.groups.members(epoch, indices[place])
            here = members[max(first - place * size, 0) : end - place * size]
            latents.append(self.latents(group, here))
            table = torch.tensor([group.scores[name] for name in self.columns])  # (K, m)
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
            cond=policy.encode([prompt.text for prompt in prompts]),
            trajectory=None,
            schedule=torch.tensor(schedule(policy, spec).tolist()),
            process=policy.process,
            spec=spec,
            guidance=spec.guidance_scale if policy.distilled_guidance else 1.0,
        )
        return rollout, torch.cat(scores), torch.full((end - first, 1), torch.nan)

    def _merged(self, drawn: Epoch, given: Epoch) -> Epoch:
        """One epoch of two, the set's groups spread evenly over it: every process has as many of them, as the config's
        check sees to, and so has every optimiser step."""
        size, (one, other) = self.groups.size, (drawn[0], given[0])
        count, ours = len(one.prompts) + len(other.prompts), len(other.prompts)
        from_set = [(place + 1) * ours // count > place * ours // count for place in range(count)]
        order, local = _order(from_set, len(one.prompts)), len(one.member) + len(other.member)
        first = (one.first + other.first) // size
        mine = from_set[first : first + local // size]
        rows = (_order(mine, len(one.member) // size)[:, None] * size + torch.arange(size)).flatten()
        number = torch.arange(first * size, first * size + local)
        prompts = [*one.prompts, *other.prompts]
        rollout = dataclasses.replace(
            one,
            prompts=[prompts[i] for i in order.tolist()],
            prompt_index=number // size,
            member=number % size,
            first=first * size,
            total=count * size,
            latents=torch.cat([one.latents, other.latents])[rows.to(one.latents.device)],
            cond=Conditioning.cat([one.cond, other.cond]).select(order),
        )
        unknown = given[2].expand(-1, drawn[2].shape[1])
        return rollout, torch.cat([drawn[1], given[1]])[rows], torch.cat([drawn[2], unknown])[rows]


def _order(from_set: Sequence[bool], drawn: int) -> Tensor:
    """(P,) place of each group in the list of those that were drawn, `drawn` of them, followed by the set's."""
    mask = torch.tensor(from_set, dtype=torch.bool)
    return torch.where(mask, drawn + mask.cumsum(0) - 1, (~mask).cumsum(0) - 1)
