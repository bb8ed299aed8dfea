"""How many forwards a rollout and how many rows an optimiser step has on a process, by the method's own account.

A method may leave rows out, which its scores decide: so its own selection is asked, on scores drawn at random (no two
are equal) and on the run's own order of samples. Symbols: N images over all processes, n of them on each, K rewards.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from diffrl.config import Config
from diffrl.config.reward import auxiliary_names
from diffrl.denoising import Chain
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.minibatches import AUTO_ROWS, holds_groups, optimiser_steps, part_sizes
from diffrl.objectives.objective import Objective
from diffrl.prompts import Prompt, split_groups
from diffrl.samplers import window_steps
from diffrl.seeds import generator, seed_of

WINDOWS = 64  # epochs whose windows are looked at
EPOCHS = 4  # looked at from the first on, and the last one: a tree's window of rows moves


def micro_batches(config: Config, objective: Objective, world: int = 1) -> list[int]:
    """Rows of the micro-batches of an optimiser step on each of `world` processes; of the largest such step where a
    method selects."""
    optimise, group = config.optimise, config.rollout.group_size
    most = AUTO_ROWS if optimise.micro_batch == "auto" else optimise.micro_batch
    here = optimise.batch_size // world
    if objective.selects:  # selected rows lie as they come, so groups are cut
        return part_sizes(most_rows(config, objective, world), most)
    rows = here * config.objective_section.trained_steps(config.rollout)
    return part_sizes(rows, most, holds_groups(here, group, objective.whole_groups))


def most_rows(config: Config, objective: Objective, world: int = 1) -> int:
    """The most rows that `objective.pairs` leaves of an optimiser step on one of `world` processes, at least 1."""
    rollout, optimise, most = config.rollout, config.optimise, 1
    total, group = rollout.images, rollout.group_size
    count, unit = total // world, group if objective.whole_groups else 1
    for epoch in sorted({*range(min(config.epochs, EPOCHS)), config.epochs - 1}):
        advantages = objective.shaped(_scored(config, objective, epoch))
        for rank in range(world):
            first = rank * count
            own, local = advantages[first : first + count], _rollout(config, objective, first, count)
            for inner in range(optimise.inner_epochs):
                order = seed_of(config.seed, epoch, inner, "steps")
                for samples in optimiser_steps(total, optimise.batch_size, first, count, order, unit):
                    most = max(most, len(objective.pairs(local, own, samples, epoch)))
    return most


def rollout_forwards(config: Config, objective: Objective, world: int = 1) -> float:
    """Of the network for a process's images of an epoch and their scouts, a mean over the first epochs' windows."""
    rollout, group = config.rollout, config.rollout.group_size
    plan = Chain() if objective.credit is None else objective.credit.plan(rollout)
    members = [divmod(i, group) for i in range(rollout.images // world)]
    batches = [members[i : i + rollout.batch_size] for i in range(0, len(members), rollout.batch_size)]
    starts = [window_steps(rollout, config.seed, epoch).start for epoch in range(min(config.epochs, WINDOWS))]
    counts = Counter(starts)
    total = sum(
        times * plan.forwards(rollout, start, batch, group) for start, times in counts.items() for batch in batches
    )
    scouts = 0 if rollout.scout is None else rollout.candidates // world * rollout.scout.steps
    return total / len(starts) + scouts


def _scored(config: Config, objective: Objective, epoch: int) -> ScoredBatch:
    """An epoch's scores, all different, and so close that weights by them leave none out."""
    rollout, draw = config.rollout, generator("selection", epoch)
    weights = [reward.weight for reward in config.rewards.values()] or [1.0]
    total, rewards = rollout.images, len(weights)
    plan = Chain() if objective.credit is None else objective.credit.plan(rollout)
    views = plan.views(rollout)
    scores = torch.randn(total, views, rewards, generator=draw) / 1000
    return ScoredBatch(
        scores=scores[:, 0],
        weights=torch.tensor(weights),
        groups=torch.arange(total) // rollout.group_size,
        features=torch.randn(total, 4, generator=draw),
        auxiliary=torch.randn(total, len(auxiliary_names(config)), generator=draw),
        views=scores if views > 1 else None,
    )


def _rollout(config: Config, objective: Objective, first: int, count: int) -> Any:
    """A process's images, as far as a selection looks at them."""
    rollout, number = config.rollout, torch.arange(first, first + count)
    stored = config.objective_section.trained_steps(rollout)
    sources = split_groups(config.prompts.train, config.drawn_groups or rollout.groups)
    return SimpleNamespace(
        prompts=[one for source, groups in sources.items() for one in [Prompt("", source=source)] * groups],
        first=first,
        total=rollout.images,
        member=number % rollout.group_size,
        prompt_index=number // rollout.group_size,
        schedule=torch.zeros(rollout.steps + 1),
        trajectory=SimpleNamespace(t=torch.zeros(count, stored)) if objective.keep_trajectory else None,
    )
