"""The seams between the one loop and the methods (design: rows, scalars, loss, penalty).

Symbols: n local samples, N samples of all processes, T training rows per sample, b rows of a micro-batch, K rewards,
m scalars per row; latents (b, C, h, w).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from diffrl.forward import Prediction
from diffrl.policy import Conditioning, Policy
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
    std: Tensor | None = None  # broadcastable to `mean`


class Objective(Protocol):
    """What turns a rollout into a loss. State that shapes the future is in `state_dict`."""

    name: str
    snapshots: tuple[str, ...]  # LoRA snapshots it keeps
    samples_from: str  # the snapshot that rollouts are drawn with
    keep_trajectory: bool

    def rows_per_sample(self, rollout: Rollout) -> int:
        """T: training rows for each sample."""

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        """The micro-batch for `pairs` (b, 2) of (local sample, row number in 0 .. T-1).

        `advantages` (n, K) are those of the local samples; `key` seeds what is random in a row.
        """

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, m): differentiable per-row scalars of the trained LoRA."""

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """(K,) losses, summed over the rows: a cheap function of `phi` and `rows.advantages`."""

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


def optimiser_steps(total: int, batch: int, first: int, count: int, key: int) -> list[Tensor]:
    """Which samples of this process belong to which optimiser step of an epoch.

    Args:
        total: samples of the epoch over all processes.
        batch: samples of one optimiser step over all processes; divides `total`.
        first: global index of this process's first sample.
        count: number of this process's samples; a multiple of `total // batch`.
        key: seed of the assignment.

    Returns:
        One (count * batch // total,) tensor of local indices per step. Every block of `total // batch` consecutive
        samples gives one sample to each step, so steps are balanced over prompts and over any number of processes,
        and the assignment does not depend on the number of processes.
    """
    steps = total // batch
    generator = torch.Generator().manual_seed(key)
    order = torch.rand(batch, steps, generator=generator).argsort(dim=1)  # (batch blocks, steps)
    samples = order + torch.arange(batch)[:, None] * steps
    local = samples[first // steps : (first + count) // steps] - first
    return [local[:, step] for step in range(steps)]
