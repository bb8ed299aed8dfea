"""Rehearsal: while it is rewarded, the model goes on predicting its own images of before (prior preservation).

symbol    name here    meaning
x0        latents      an image of the pretrained model, from a pool that is drawn once
e         errors       mean over dims of (v_theta - v)^2 at a level of the schedule, with fresh noise
w         weight       how much of it is added to a step's loss

    loss + w mean e        over one base image for every `every` images of the step

What the pretrained model draws is what minimises e on its images. A KL to it asks the same at the images that are
trained on, which drift; e asks it where the pretrained model itself draws, so modes that training no longer visits are
still rehearsed. It needs no reference forward, but a forward and a backward for each base image, and the pool. Base
images that were drawn with guidance are learned without, so that guidance is distilled, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from diffrl.policy import Policy
from diffrl.prompts import Prompt
from diffrl.rollout import Rollout, SamplerSpec, collect
from diffrl.seeds import noise, seed_of
from diffrl.trainers.algorithm import RunningMeans


class Rehearsal:
    """A pool of the pretrained model's images, and their share of an optimiser step.

    Args:
        pool: how many images there are, one for each of as many prompts as there are.
        weight: w.
        every: a step of B images rehearses B / every; which ones is keyed by the image, whatever the process.
        micro_batch: rows of a forward, at most.
    """

    def __init__(self, *, pool: int, weight: float, every: int, micro_batch: int = 16) -> None:
        self.pool, self.weight, self.every, self.micro_batch = pool, weight, every, micro_batch
        self.latents: Tensor | None = None  # (pool, C, h, w) on the CPU
        self.texts: list[str] = []
        self._rank, self._world = 0, 1
        self._reduce: Callable[[Tensor], Tensor] = lambda x: x

    def draw(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        spec: SamplerSpec,
        *,
        seed: int,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        reduce: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """The pool, by a deterministic `spec`, each process its share: a resumed run draws the same one again."""
        self._rank, self._world, self._reduce = rank, world, reduce
        texts = list(dict.fromkeys(prompt.text for prompt in prompts))
        members = -(-self.pool // len(texts))
        chosen = sorted(texts, key=lambda text: seed_of(seed, "rehearsal", text))[: -(-self.pool // members)]
        amount: dict[str, Any] = {"seed": seed, "epoch": "rehearsal", "group_size": members, "batch_size": batch_size}
        with policy.together():
            found = collect(
                policy, [Prompt(text) for text in chosen], spec, **amount, rank=rank, world=world, snapshot=None,
                keep_images=False,
            )  # fmt: skip
        latents = torch.zeros(found.total, *found.latents.shape[1:], device=policy.device)
        latents[found.first : found.first + len(found.latents)] = found.latents
        self.latents = reduce(latents)[: self.pool].cpu()
        self.texts = [text for text in chosen for _ in range(members)][: self.pool]

    def errors(self, policy: Policy, rollout: Rollout, names: Sequence[tuple[int | str, ...]]) -> Tensor:
        """e (b,) of the base images that belong to `names`, each at its own level of the rollout's schedule."""
        assert self.latents is not None, "draw() comes first"
        which = [seed_of(*name, "image") % len(self.latents) for name in names]
        level = [seed_of(*name, "level") % (len(rollout.schedule) - 1) for name in names]
        x0, t = self.latents[which], rollout.schedule[level]
        eps = noise(tuple(x0.shape[1:]), [(*name, "eps") for name in names])
        x0, t, eps = (values.to(policy.device, non_blocking=True) for values in (x0, t, eps))
        cond = policy.encode([self.texts[i] for i in which])
        v = policy.predict(policy.process.add_noise(x0, eps, t), t, cond, rollout.guidance).v
        return (v - policy.process.velocity(x0, eps, t)).square().flatten(1).mean(1)

    def add(
        self,
        policy: Policy,
        rollout: Rollout,
        samples: Tensor,
        key: tuple[int | str, ...],
        step_images: int,
        scaler: GradScaler,
        means: RunningMeans,
    ) -> Tensor:
        """Backward of this process's part of w mean e, for the local `samples` of a step of `step_images`; the part."""
        chosen = [i for i in samples.tolist() if (rollout.first + i) % self.every == 0]
        names = [(*key, *rollout.identity(i), "rehearsal") for i in chosen]
        total = torch.zeros((), device=policy.device)
        means.add("rehearsal/error", total.new_zeros(0))  # every process logs the same names, also one without images
        passes = -(-len(names) // self.micro_batch)
        if policy.sharded:
            passes = self._most(passes, policy.device)
        for start in range(0, passes * self.micro_batch, self.micro_batch):
            part_names = names[start : start + self.micro_batch]
            if not part_names:  # for its part in gathering the others' weights, forward and backward
                (0.0 * self.errors(policy, rollout, [(*key, *rollout.identity(0), "rehearsal")]).sum()).backward()
                continue
            errors = self.errors(policy, rollout, part_names)
            means.add("rehearsal/error", errors)
            part = self.weight * errors.sum() * self.every / step_images
            scaler.scale(part).backward()
            total += part.detach()
        return total

    def _most(self, passes: int, device: torch.device) -> int:
        """Of all processes' numbers of passes the largest: a sharded network's are everybody's."""
        table = torch.zeros(self._world, device=device)
        table[self._rank] = passes
        return int(self._reduce(table).max())
