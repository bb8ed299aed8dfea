"""Where an epoch's images come from: an `EpochSource`. The plain one draws them and scores them while it draws more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from diffrl.features import Features
from diffrl.objectives.objective import Objective
from diffrl.policy import Policy
from diffrl.prompts import MixedStream, Prompt, PromptStream
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import Rollout, collect
from diffrl.run.hooks import Monitor, RunHook
from diffrl.run.processes import Processes
from diffrl.samplers import SamplerSpec
from diffrl.seeds import seed_of


class Epoch(NamedTuple):
    """This process's n images of an epoch."""

    rollout: Rollout
    scores: Tensor  # (n, K) or, of V views, (n, V, K); NaN where a reward does not apply
    features: Tensor  # (n, F) of the diversity measure, NaN of images that were not drawn


class EpochSource(Protocol):
    """What an epoch is trained on. A source may wrap another one; all processes call it together."""

    @property
    def stream(self) -> PromptStream | MixedStream:
        """The prompts of each epoch, whose texts have to be encoded."""

    def __call__(self, epoch: int) -> Epoch:
        """Of an epoch from 0 on."""


class Rollouts:
    """The plain source: `group_size` images of each prompt, drawn anew.

    Args:
        spec: how images are drawn; a calibration may replace it.
        batch_size: images per forward and process.
        hooks: see the images as they are drawn (`RunHook.on_images`).
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        scorer: Scorer,
        features: Features,
        stream: PromptStream | MixedStream,
        spec: SamplerSpec,
        *,
        seed: int,
        group_size: int,
        batch_size: int,
        processes: Processes,
        monitor: Monitor,
        hooks: Sequence[RunHook] = (),
    ) -> None:
        self.policy, self.objective, self.scorer, self.features = policy, objective, scorer, features
        self.stream, self.spec = stream, spec
        self.seed, self.group_size, self.batch_size = seed, group_size, batch_size
        self.processes, self.monitor, self.hooks = processes, monitor, hooks

    def __call__(self, epoch: int) -> Epoch:
        return self.draw(self.prompts(epoch), epoch)

    def beside(self, key: str) -> Epoch:
        """Images of the first epoch's prompts that nothing is trained on; `key` takes the epoch's place in the keys of
        the random numbers."""
        return self.draw(self.prompts(0), key)

    def prompts(self, epoch: int) -> list[Prompt]:
        return [self.stream.prompts[i] for i in self.stream.batch(epoch)]

    def draw(self, prompts: Sequence[Prompt], key: int | str, members: Tensor | None = None) -> Epoch:
        """Draw and score images of these prompts.

        Args:
            key: the epoch, or what takes its place in the random numbers' keys; hooks see the images of epochs alone.
            members: (P, G) which images of each prompt; None: 0 to `group_size` - 1.
        """
        group_size = self.group_size if members is None else members.shape[1]
        first = self.processes.rank * len(prompts) * group_size // self.processes.count
        plan = None if self.objective.credit is None else self.objective.credit.plan(self.spec)
        final, count = (0, 1) if plan is None else (plan.final(self.spec), plan.views(self.spec))
        observed = bool(self.scorer.observing)
        pending: list[list[Any]] = [[] for _ in range(count)]
        pictures: list[list[Tensor]] = [[] for _ in range(count)]
        features: list[Tensor] = []

        def on_view(images: Tensor, part: slice, view: int) -> None:
            owners = [prompts[(first + i) // group_size] for i in range(part.start, part.stop)]
            keys = None
            if observed and view == final:
                numbers = range(first + part.start, first + part.stop)
                keys = [seed_of(self.seed, key, number, "learning") for number in numbers]
            self.submit(images, owners, pending[view], keys)
            if self.scorer.later:
                pictures[view].append(images.cpu())

        def on_batch(images: Tensor, part: slice) -> None:
            on_view(images, part, final)
            for hook in self.hooks if isinstance(key, int) else ():
                hook.on_images(images, first + part.start)
            mark = time.perf_counter()
            features.append(self.features(images))
            self.processes.clock.add("reward", mark)
            self.monitor.status(f"sampling {part.stop}/{len(prompts) * group_size // self.processes.count}")
            self.monitor.check()

        with self.policy.uneven_forwards():
            rollout = collect(
                self.policy,
                prompts,
                self.spec,
                seed=self.seed,
                epoch=key,
                group_size=group_size,
                batch_size=self.batch_size,
                rank=self.processes.rank,
                world=self.processes.count,
                snapshot=self.objective.samples_from,
                on_batch=on_batch,
                keep_trajectory=self.objective.keep_trajectory,
                keep_images=False,
                plan=plan,
                on_view=on_view,
                members=members,
            )
        columns = self._finished(prompts, rollout, pending, pictures).chunk(count)
        rollout.maps = self.scorer.take_kept()
        return Epoch(rollout, columns[0] if plan is None else torch.stack(columns, 1), torch.cat(features))

    def submit(
        self, images: Tensor, owners: Sequence[Prompt], pending: list[Any], keys: Sequence[int] | None = None
    ) -> None:
        """Have a batch scored; its scores to come are the last of `pending`. `keys`: for rewards that observe it."""
        mark = time.perf_counter()
        pending.append(self.scorer.submit(images, owners, keys))
        self.processes.clock.add("reward", mark)

    def _finished(
        self, prompts: Sequence[Prompt], rollout: Rollout, pending: list[list[Any]], pictures: list[list[Tensor]]
    ) -> Tensor:
        """Scores (V n, K) of all views, one after the other, with those of rewards that need `pictures`, by view."""
        mark, count = time.perf_counter(), len(pending)
        owners = [prompts[i] for i in rollout.prompt_index.tolist()] * count
        groups = torch.cat([rollout.prompt_index + view * len(prompts) for view in range(count)])
        known = torch.cat([future.result() for view in pending for future in view])
        waiting = [images for view in pictures for images in view]
        scores = self.scorer.finish(
            known,
            waiting,
            owners,
            groups,
            lambda: self.policy.offloaded(),
            lambda rows: (self.processes.gather(rows), rollout.first),
        )
        self.processes.clock.add("reward", mark)
        return scores
