"""Losses that couple a group's samples: dL/dphi of the whole step comes first, so that micro-batches stay independent.

Symbols: N samples over all processes, n of them here, P groups of G, T rows per sample, K columns of advantages. A loss
L(phi_1 .. phi_G) of a group's scalars has the gradient sum_i c_i grad phi_i with c = dL / dphi, a number for each row
and column: so the step's phi are measured without gradient first, and c is exact whatever the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diffrl.config.methods import ForwardProcess
from diffrl.objectives.noising import Noising
from diffrl.objectives.objective import Objective, OptimiserStep
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy


def velocity_error(prediction: Tensor, target: Tensor, weighted: bool = True) -> Tensor:
    """(B,) `mean (v_. - v)^2 / w` over latent dimensions; w = stopgrad(mean |v_. - v|), at least 1e-5, or 1."""
    difference = prediction - target
    error = difference.square().flatten(1).mean(1)
    return error / difference.detach().abs().flatten(1).mean(1).clamp_min(1e-5) if weighted else error


@torch.no_grad()
def measured(
    objective: Objective,
    policy: Policy,
    step: OptimiserStep,
    values: Callable[[Rows], tuple[Tensor, ...]],
    count: int = 1,
) -> Tensor:
    """(count, N, T) of what `values` says (b,) of the step's rows, over all processes; 0 for what is not in the step.

    Groups that are split over processes need the others' values, so all are summed where there are several.
    """
    rollout = step.rollout
    table = torch.zeros(count, rollout.total, objective.rows_per_sample(rollout), device=policy.device)
    with policy.uneven_forwards():  # ranks may run different numbers of forwards here
        for part in step.parts:
            if not len(part):
                continue
            sample, number = part.to(policy.device, non_blocking=True).T
            result = values(objective.rows(rollout, step.advantages, part, step.key))
            for place, value in enumerate(result):
                table[place, rollout.first + sample, number] = value
    return step.reduce(table) if len(rollout.member) < rollout.total else table


def grouped_noising(keys: ForwardProcess) -> Noising:
    """Rows that a group's members can be compared in: they share each row's level, and its noise."""
    return Noising.of(keys, group_level=True, group_noise=True)


@torch.no_grad()
def error_under(policy: Policy, rows: Rows, name: str | None, guidance: float | None = None) -> Tensor:
    """e (b,) of the snapshot `name`, mean over dims of (v_. - v)^2; None: the pretrained model's. `guidance` of that
    prediction; None: the rows'."""
    with policy.adapter(name):
        v = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance if guidance is None else guidance).v
    return velocity_error(v, rows.velocity(policy.process), weighted=False)


def excess_error(policy: Policy, rows: Rows, anchor: str | None) -> Tensor:
    """e_theta - e_ref (b,), without gradient, the reference being the snapshot `anchor`."""
    return error_under(policy, rows, "default") - error_under(policy, rows, anchor)


def own_error(policy: Policy, rows: Rows) -> Tensor:
    """e_theta (b, 1), differentiable; leaves the prediction in the rows. The reference's part is a constant."""
    rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
    return velocity_error(rows.prediction.v, rows.velocity(policy.process), weighted=False)[:, None]


def all_gather_rows(step: OptimiserStep, values: Tensor, device: torch.device) -> Tensor:
    """(N, ...) on the device of what each process knows of its own samples (n, ...)."""
    rollout = step.rollout
    table = torch.zeros(rollout.total, *values.shape[1:], device=device)
    table[rollout.first : rollout.first + len(values)] = values.to(device, non_blocking=True)
    return step.reduce(table) if len(values) < rollout.total else table


class GroupLoss:
    """The loss `sum_i c_i phi_i` of a group's rows, its slopes c being measured before the step.

    Args:
        slopes: from what was measured (count, P, G, T), the advantages (P, G, K) and `mine` to c (P, G, T, K). `mine`
            (P,) bool: groups that the step trains and that begin on this process, for metrics: each group counts once.
        count: how many values of each row are measured.
    """

    def __init__(self, slopes: Callable[[Tensor, Tensor, Tensor], Tensor], count: int = 1) -> None:
        self.slopes, self.count = slopes, count
        self._table: Tensor | None = None  # (n, T, K) of the step

    def measure(
        self, objective: Objective, policy: Policy, step: OptimiserStep, values: Callable[[Rows], tuple[Tensor, ...]]
    ) -> None:
        """The step's slopes, the same on every process. `values` says `count` numbers (b,) of rows."""
        rollout = step.rollout
        prompts, first = len(rollout.prompts), rollout.first
        table = measured(objective, policy, step, values, self.count)
        trained = step.advantages.new_zeros(len(rollout.member), 1)
        trained[torch.cat(list(step.parts))[:, 0]] = 1.0
        known = all_gather_rows(step, torch.cat([step.advantages, trained], 1), policy.device).unflatten(
            0, (prompts, -1)
        )
        begins = torch.arange(prompts) * known.shape[1] - first
        here = ((begins >= 0) & (begins < len(rollout.member))).to(policy.device, non_blocking=True)
        mine = here & (known[:, :, -1] > 0).any(1)
        slopes = self.slopes(table.unflatten(1, known.shape[:2]), known[:, :, :-1], mine)
        self._table = slopes.flatten(0, 1)[first : first + len(rollout.member)]

    def of(self, rows: Rows) -> Tensor:
        """(b, K) slopes of the rows."""
        assert self._table is not None, "measure() runs before loss()"
        return self._table[rows.places()]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """(K,) summed over the rows, phi (b, 1)."""
        return (self.of(rows) * phi).sum(0)


def _extreme(scores: Tensor, group: Tensor, largest: bool) -> Tensor:
    """(N, K): the largest or smallest known score of each row's group; infinite where the group has none.

    group (N, 1) counts the groups; for all of them at once, as an image set's epoch has thousands.
    """
    nothing = -torch.inf if largest else torch.inf
    index, values = group.expand_as(scores), scores.masked_fill(scores.isnan(), nothing)
    found = torch.full_like(scores, nothing).scatter_reduce(0, index, values, "amax" if largest else "amin")
    return found.gather(0, index)


def best_and_worst(scores: Tensor, groups: Tensor, std: str = "none") -> Tensor:
    """(N, K): +1 for the best of a group, -1 for the worst, else 0; of equal ones the first is the best and the last
    the worst. A group whose known scores are all equal has no pair."""
    group = groups.unique(return_inverse=True)[1][:, None]
    place = torch.arange(len(scores), device=scores.device, dtype=torch.float64)[:, None]
    high, low = _extreme(scores, group, True), _extreme(scores, group, False)

    def one(picked: Tensor, first: bool) -> Tensor:
        numbers = place.where(picked & (high > low), torch.nan)
        return (numbers == _extreme(numbers, group, not first)).to(scores)

    return one(scores == high, True) - one(scores == low, False)


def best_of_group(scores: Tensor, groups: Tensor, std: str = "none") -> Tensor:
    """(N, K): 1 for the best of a group and for all that tie with it, as in Flow-GRPO's code, else 0."""
    return (scores == _extreme(scores, groups.unique(return_inverse=True)[1][:, None], True)).to(scores)


def chosen_pairs(advantages: Tensor, samples: Tensor, rows_per_sample: int) -> Tensor:
    """(rows, 2) of (local sample, row number) that have an advantage other than 0 (n, K), row number major."""
    compared = samples[advantages[samples].abs().sum(1) > 0]
    number = torch.arange(rows_per_sample).repeat_interleave(len(compared))
    return torch.stack([compared.repeat(rows_per_sample), number], dim=1)
