"""An epoch's images on this process: drawn batch by batch, and scored while the next ones are drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffrl.prompts import Prompt
from diffrl.rollout import Rollout, collect
from diffrl.run.buffers import QUEUED
from diffrl.run.showing import Seen
from diffrl.seeds import seed_of

if TYPE_CHECKING:
    from diffrl.run.loop import Loop


def draw(
    loop: Loop, prompts: Sequence[Prompt], key: int | str, members: Tensor | None = None
) -> tuple[Rollout, Tensor, Tensor]:
    """The rollout of what trains, with its scores (n, K) or (n, V, K) and features (n, F).

    Args:
        key: the epoch, or what takes its place in the random numbers' keys.
        members: (P, G) which images of each prompt; None: 0 to G - 1.
    """
    group_size = loop.settings.group_size if members is None else members.shape[1]
    rank, world = loop.processes.rank, loop.processes.count
    first = rank * len(prompts) * group_size // world
    plan = None if loop.objective.credit is None else loop.objective.credit.plan(loop.spec)
    final, count = (0, 1) if plan is None else (plan.final(loop.spec), plan.views(loop.spec))
    learning = bool(loop.scorer.learning)
    pending: list[list[Any]] = [[] for _ in range(count)]
    pictures: list[list[Tensor]] = [[] for _ in range(count)]
    features: list[Tensor] = []
    seen = Seen(loop, key, prompts)

    def on_view(images: Tensor, part: slice, view: int) -> None:
        owners = [prompts[(first + i) // group_size] for i in range(part.start, part.stop)]
        keys = None
        if learning and view == final:
            numbers = range(first + part.start, first + part.stop)
            keys = [seed_of(loop.settings.seed, key, number, "learning") for number in numbers]
        submit(loop, images, owners, pending[view], keys)
        if loop.scorer.later:
            pictures[view].append(images.cpu())

    def on_batch(images: Tensor, part: slice) -> None:
        on_view(images, part, final)
        seen.add(images, first + part.start)
        mark = time.perf_counter()
        features.append(loop.features(images))
        loop.clock.add("reward", mark)
        loop.status(f"sampling {part.stop}/{len(prompts) * group_size // world}")
        loop.check()

    with loop.policy.together():
        rollout = collect(
            loop.policy,
            prompts,
            loop.spec,
            seed=loop.settings.seed,
            epoch=key,
            group_size=group_size,
            batch_size=loop.settings.rollout_batch,
            rank=rank,
            world=world,
            snapshot=loop.objective.samples_from,
            on_batch=on_batch,
            keep_trajectory=loop.objective.keep_trajectory,
            keep_images=False,
            plan=plan,
            on_view=on_view,
            members=members,
        )
    columns = list(finished(loop, prompts, rollout, pending, pictures).chunk(count))
    rollout.maps = loop.scorer.maps.take()
    columns[final] = seen.answered(columns[final])
    return rollout, columns[0] if plan is None else torch.stack(columns, 1), torch.cat(features)


def finished(
    loop: Loop, prompts: Sequence[Prompt], rollout: Rollout, pending: list[list[Any]], pictures: list[list[Tensor]]
) -> Tensor:
    """Scores (V n, K) of all views, one after the other, with those of rewards that need `pictures`, by view."""
    mark, count = time.perf_counter(), len(pending)
    owners = [prompts[i] for i in rollout.prompt_index.tolist()] * count
    groups = torch.cat([rollout.prompt_index + view * len(prompts) for view in range(count)])
    known = torch.cat([future.result() for view in pending for future in view])
    waiting = [images for view in pictures for images in view]
    scores = loop.scorer.finish(
        known,
        waiting,
        owners,
        groups,
        lambda: loop.policy.apart(),
        lambda rows: (loop.processes.gather(rows), rollout.first),
    )
    loop.clock.add("reward", mark)
    return scores


def submit(
    loop: Loop, images: Tensor, owners: Sequence[Prompt], pending: list[Any], keys: Sequence[int] | None = None
) -> None:
    """Have a batch scored; its scores to come are the last of `pending`. `keys`: rewards that learn observe them."""
    mark = time.perf_counter()
    if len(pending) >= QUEUED:
        pending[-QUEUED].result()
    pending.append(loop.scorer.submit(images, owners, keys))
    loop.clock.add("reward", mark)
