"""The seams between the one loop and the methods (design: rows, scalars, loss, penalty).

Symbols: n local samples, N samples of all processes, T training rows per sample, b rows of a micro-batch, K rewards,
m scalars per row; latents (b, C, h, w).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from diffrl.advantages import Std, decoupled_advantages, group_advantages, weighted_sum
from diffrl.forward import Prediction
from diffrl.policy import Conditioning, Policy
from diffrl.prompts import Prompt
from diffrl.rollout import Rollout


@dataclass
class Rows:
    """A micro-batch of (sample, timestep) pairs; everything that an objective needs to compute its scalars."""

    x0: Tensor  # (b, C, h, w) clean latents of the generated images
    x_t: Tensor  # (b, C, h, w) network input
    t: Tensor  # (b,) noise level in [0, 1]
    cond: Conditioning  # of the b rows
    advantages: Tensor  # (b, K)
    groups: Tensor  # (b,) int64
    on_policy: bool  # True while the trained LoRA equals the snapshot that sampled
    guidance: float = 1.0
    x_next: Tensor | None = None  # (b, C, h, w) stored next state of a stochastic step (GRPO)
    t_next: Tensor | None = None  # (b,)
    t_second: float = 1.0  # second noise level of the schedule, where s(t = 1) is evaluated
    log_prob: Tensor | None = None  # (b,) of the stored step when it was sampled
    prediction: Prediction | None = None  # of the trained LoRA, left here by `scalars` for `penalty`
    mean: Tensor | None = None  # (b, C, h, w) of the step under the trained LoRA (GRPO), left by `scalars`
    std: Tensor | None = None  # (b, 1, 1, 1)
    prompts: Sequence[Prompt] = ()  # all of the epoch's, row i has prompts[groups[i]]: for rewards in the loss (direct)
    pairs: Tensor | None = None  # (b, 2) of (local sample, row number), for what spans micro-batches (CRD)
    eps: Tensor | None = None  # (b, C, h, w) the noise in x_t, for what needs the true velocity (CRD)
    slot: Tensor | None = None  # (b,) int64 on the CPU: the row's place among a step's saved references, -1: none

    def select(self, index: Tensor) -> Rows:
        """The rows `index` (n,) int64 on the CPU, with whatever `scalars` left in them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value[index.to(value.device)]
            elif isinstance(value, Conditioning):
                values[name] = value.select(index)
            elif isinstance(value, Prediction):
                on = index.to(value.v.device)
                values[name] = Prediction(value.x0[on], value.eps[on], value.v[on])
        return Rows(**values)


@dataclass(frozen=True)
class Scored:
    """An epoch's scores over all processes, in global sample order, on the CPU."""

    scores: Tensor  # (N, K), NaN where a reward does not apply
    weights: Tensor  # (K,) of the config
    groups: Tensor  # (N,) int64
    features: Tensor  # (N, F) of the diversity measure
    auxiliary: Tensor  # (N, A) of rewards that are read and never optimised (GARDO); A may be 0


@dataclass(frozen=True)
class Step:
    """One optimiser step's share of this process, before its first backward pass.

    `parts` are the micro-batches, pairs (b, 2) of (local sample, row number); `objective.rows(rollout, advantages,
    part, key)` makes the rows of one. `reduce` sums a tensor over processes: every process must call it equally often.
    """

    rollout: Rollout
    advantages: Tensor  # (n, K)
    parts: Sequence[Tensor]
    key: tuple[int | str, ...]
    reduce: Callable[[Tensor], Tensor]


class AdvantageRule:
    """From scores to advantages. A method that wraps an objective may change `std` (GARDO), `each`, `total` (MARBLE).

    `each`: one column for each reward. `total`: a column (the last) of all rewards together, which is the advantage of
    the weighted sum of scores ("rewards") or the weighted sum of advantages ("advantages"); None: no such column.
    """

    def __init__(self, std: Std) -> None:
        self.std: Std = std
        self.each = False
        self.total: Literal["rewards", "advantages"] | None = "rewards"

    def __call__(self, scored: Scored) -> Tensor:
        """(N, columns)."""
        groups, columns = scored.groups, []
        if self.each:  # the sizes of weights matter little to separate columns, their signs do
            columns.append(group_advantages(scored.scores * scored.weights, groups, self.std))
        if self.total == "advantages":
            columns.append(decoupled_advantages(scored.scores, scored.weights, groups, self.std))
        elif self.total == "rewards":
            columns.append(group_advantages(weighted_sum(scored.scores, scored.weights), groups, self.std))
        return torch.cat(columns, dim=1)

    def known(self, scored: Scored) -> Tensor:
        """(N, columns) bool: where a reward, or any of those of the total, applies."""
        known = ~scored.scores.isnan()
        total = [known.any(dim=1, keepdim=True)] if self.total is not None else []
        return torch.cat([known, *total] if self.each else total, dim=1)


class Objective(Protocol):
    """What turns a rollout into a loss. State that shapes the future is in `state_dict`."""

    name: str
    rule: AdvantageRule
    beta: float  # weight of the penalty; 0: no reference forward
    snapshots: tuple[str, ...]  # LoRA snapshots it keeps
    samples_from: str  # the snapshot that rollouts are drawn with
    reference: str | None  # the snapshot that the penalty refers to; None is the pretrained model
    keep_trajectory: bool
    whole_groups: bool  # True: the members of a prompt group stay together in an optimiser step

    def advantages(self, scored: Scored) -> Tensor:
        """(N, K): what `rule` says, unless a wrapper shapes it."""

    def rows_per_sample(self, rollout: Rollout) -> int:
        """T: training rows for each sample."""

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        """The micro-batch for `pairs` (b, 2) of (local sample, row number in 0 .. T-1).

        `advantages` (n, K) are those of the local samples; `key` seeds what is random in a row.
        """

    def before_step(self, policy: Policy, step: Step) -> None:
        """Called before the first backward pass of an optimiser step: for what needs more than one micro-batch."""

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, m): differentiable per-row scalars of the trained LoRA."""

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """(K,) losses, summed over the rows: a cheap function of `phi` and `rows.advantages`."""

    def reference_of(self, policy: Policy, rows: Rows) -> Prediction:
        """What the penalty holds the rows to, without gradient: a forward of the reference."""

    def divergence(self, policy: Policy, rows: Rows, reference: Prediction) -> Tensor:
        """(b,) unweighted distance of the rows' predictions, which `scalars` left there, from `reference`."""

    def penalty(self, policy: Policy, rows: Rows) -> Tensor | None:
        """(b,) weighted regulariser, or None when it has no weight (then nothing is computed)."""

    def after_step(self, policy: Policy, step: int) -> None:
        """Called after every optimiser step with the number of steps so far."""

    def after_epoch(self, policy: Policy, step: int) -> None:
        """Called after the last optimiser step of an epoch."""

    def metrics(self) -> dict[str, Tensor]:
        """Sums since the last call, as {name: tensor [sum, count]}; they stay on the device."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Gradients(Protocol):
    """How the losses of a micro-batch become gradients of the LoRA: their sum, or K gradients balanced (MARBLE)."""

    def add(self, objective: Objective, policy: Policy, rows: Rows, rows_of_step: int, scaler: GradScaler) -> Tensor:
        """Backward of one micro-batch as its share of the step's mean over rows; returns that share, detached."""

    def finish(self, parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor] | None) -> None:
        """Leave the step's gradient over all processes in `parameters`.

        `reduce` sums a tensor over processes; it is None if there is only one.
        """

    def metrics(self) -> dict[str, Any]:
        """Numbers for the epoch's line of metrics.jsonl since the last call; the same on every process."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SumOfLosses:
    """The plain way: one backward of the summed losses and the penalty."""

    weights: Tensor | None = None  # (K,) factors of the losses, on the device; None: 1

    def add(self, objective: Objective, policy: Policy, rows: Rows, rows_of_step: int, scaler: GradScaler) -> Tensor:
        phi = objective.scalars(policy, rows)
        losses = objective.loss(phi, rows)
        total = losses.sum() if self.weights is None else losses @ self.weights
        penalty = objective.penalty(policy, rows)
        if penalty is not None:
            total = total + penalty.sum()
        total = total / rows_of_step
        scaler.scale(total).backward()
        return total.detach()

    def finish(self, parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor] | None) -> None:
        """One all-reduce of all LoRA gradients; losses are already divided by the rows of all processes."""
        if reduce is None:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def metrics(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A plain sum remembers nothing."""


class RunningMeans:
    """Sums and counts that stay on the device until the epoch's end: no wait for the device in the loop."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add detached per-row values (b,)."""
        values = values.detach().float()
        pair = torch.stack([values.sum(), values.new_full((), float(values.numel()))])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def take(self) -> dict[str, Tensor]:
        sums, self._sums = self._sums, {}
        return sums


@dataclass(frozen=True)
class Decay:
    """A snapshot's decay by optimiser step: 0 before `start`, then linear from `value`, at most `cap`."""

    start: int = 0
    value: float = 0.0
    slope: float = 0.0
    cap: float = 1.0

    def __call__(self, step: int) -> float:
        return 0.0 if step < self.start else min(self.value + self.slope * (step - self.start), self.cap)


def sample_pairs(samples: Tensor, rows_per_sample: int) -> Tensor:
    """All (sample, row number) pairs (s * T, 2) of some samples, row number major: group members stay side by side."""
    number = torch.arange(rows_per_sample).repeat_interleave(len(samples))
    return torch.stack([samples.repeat(rows_per_sample), number], dim=1)


def optimiser_steps(total: int, batch: int, first: int, count: int, key: int, unit: int = 1) -> list[Tensor]:
    """Which samples of this process belong to which optimiser step of an epoch.

    Args:
        total: samples of the epoch over all processes.
        batch: samples of one optimiser step over all processes; divides `total`.
        first: global index of this process's first sample.
        count: number of this process's samples; a multiple of `unit * total // batch`, unless `batch` is `total`.
        key: seed of the assignment.
        unit: so many consecutive samples stay together (the group size, for objectives that need whole groups).

    Returns:
        One (count * batch // total,) tensor of local indices per step. Every block of `total // batch` consecutive
        units gives one unit to each step, so steps are balanced over prompts and over any number of processes, and the
        assignment does not depend on the number of processes.
    """
    if batch == total:  # then a unit may also be split over processes
        return [torch.arange(count)]
    steps, blocks = total // batch, batch // unit
    generator = torch.Generator().manual_seed(key)
    order = torch.rand(blocks, steps, generator=generator).argsort(dim=1)  # (blocks, steps)
    units = order + torch.arange(blocks)[:, None] * steps
    width = steps * unit
    local = units[first // width : (first + count) // width]
    samples = local[..., None] * unit + torch.arange(unit) - first
    return [samples[:, step].flatten() for step in range(steps)]
