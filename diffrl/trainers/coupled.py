"""What the rows of a group need of one another: measured before a step, so that micro-batches stay independent.

Symbols: N samples over all processes, n of them here, P groups of G, T rows per sample, K columns of advantages. A loss
L(phi_1 .. phi_G) of a group's scalars has the gradient sum_i c_i grad phi_i with c = dL / dphi, a number for each row
and column: so the step's phi are measured without gradient first, and c is exact whatever the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diffrl.policy import Policy
from diffrl.trainers.algorithm import Objective, Step
from diffrl.trainers.crd import velocity_error
from diffrl.trainers.rows import Noising, Rows, TimestepSampling


@torch.no_grad()
def measured(
    objective: Objective, policy: Policy, step: Step, values: Callable[[Rows], tuple[Tensor, ...]], count: int = 1
) -> Tensor:
    """(count, N, T) of what `values` says (b,) of the step's rows, over all processes; 0 for what is not in the step.

    Groups that are split over processes need the others' values, so all are summed where there are several.
    """
    rollout = step.rollout
    table = torch.zeros(count, rollout.total, objective.rows_per_sample(rollout), device=policy.device)
    for part in step.parts:
        if not len(part):
            continue
        sample, number = part.to(policy.device, non_blocking=True).T
        found = values(objective.rows(rollout, step.advantages, part, step.key))
        for place, value in enumerate(found):
            table[place, rollout.first + sample, number] = value
    return step.reduce(table) if len(rollout.member) < rollout.total else table


def of_groups(timesteps: int | None, sampling: TimestepSampling, levels: int | None) -> Noising:
    """Rows that a group's members can be compared in: they share each row's level, and its noise."""
    return Noising(timesteps, sampling, levels, group_level=True, group_noise=True)


@torch.no_grad()
def excess_error(policy: Policy, rows: Rows, anchor: str | None) -> Tensor:
    """e_theta - e_ref (b,), means over dims of (v_. - v)^2, the reference being the snapshot `anchor`."""
    errors = []
    for name in ("default", anchor):
        with policy.using(name):
            v = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v
        errors.append(velocity_error(v, rows.velocity(policy.process), weighted=False))
    return errors[0] - errors[1]


def everywhere(step: Step, values: Tensor, device: torch.device) -> Tensor:
    """(N, ...) on the device of what each process knows of its own samples (n, ...)."""
    rollout = step.rollout
    table = torch.zeros(rollout.total, *values.shape[1:], device=device)
    table[rollout.first : rollout.first + len(values)] = values.to(device, non_blocking=True)
    return step.reduce(table) if len(values) < rollout.total else table


def of_row(values: Tensor, rows: Rows) -> Tensor:
    """(b, ...) of values (n, T, ...) by local sample and row number."""
    assert rows.pairs is not None, "the rows know where they come from"
    return values[rows.pairs[:, 0], rows.pairs[:, 1]]


def local(step: Step, values: Tensor) -> Tensor:
    """(n, ...) of values (N, ...)."""
    return values[step.rollout.first : step.rollout.first + len(step.rollout.member)]


def best_and_worst(scores: Tensor, groups: Tensor, std: str = "none") -> Tensor:
    """(N, K): +1 for the best of a group, -1 for the worst, else 0; of equal ones the first is the best and the last
    the worst. A group whose known scores are all equal has no pair."""
    picked = torch.zeros_like(scores)
    for group in groups.unique():
        rows = (groups == group).nonzero().flatten()
        for k in range(scores.shape[1]):
            own = scores[rows, k]
            known = (~own.isnan()).nonzero().flatten()
            if not len(known) or own[known].max() == own[known].min():
                continue
            high, low = own[known] == own[known].max(), own[known] == own[known].min()
            picked[rows[known[high.nonzero()[0, 0]]], k] = 1.0
            picked[rows[known[low.nonzero()[-1, 0]]], k] = -1.0
    return picked


def best_of_group(scores: Tensor, groups: Tensor, std: str = "none") -> Tensor:
    """(N, K): 1 for the best of a group, else 0; see `best_and_worst`."""
    return best_and_worst(scores, groups).clamp_min(0.0)


def chosen_pairs(advantages: Tensor, samples: Tensor, rows_per_sample: int) -> Tensor:
    """(rows, 2) of (local sample, row number) that have an advantage other than 0 (n, K), row number major."""
    kept = samples[advantages[samples].abs().sum(1) > 0]
    number = torch.arange(rows_per_sample).repeat_interleave(len(kept))
    return torch.stack([kept.repeat(rows_per_sample), number], dim=1)
