"""The gradients of K losses within one optimiser step, for MARBLE: how they are asked for, summed, and who has any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from diffrl.methods.marble.gradients import gram_matrix
from diffrl.methods.marble.simplex import Array
from diffrl.objectives.advantages import Columns
from diffrl.objectives.gradients import SumOfLosses
from diffrl.objectives.objective import Objective
from diffrl.objectives.rows import Rows

Mode = Literal["fresh", "full", "amortised", "uniform", "advantages", "sum"]
TOTALS: dict[str, Literal["rewards", "advantages"]] = {"sum": "rewards", "advantages": "advantages"}


def columns_of(mode: Mode, measure: bool) -> Columns:
    """Which columns the advantages have: one for each reward, and in the modes of `TOTALS` a last one of all together.

    Such a total alone, which is trained as if there was one reward, where nothing is measured.
    """
    if mode not in TOTALS:
        return "each"
    each: dict[str, Columns] = {"rewards": "each+rewards", "advantages": "each+advantages"}
    return each[TOTALS[mode]] if measure else TOTALS[mode]


def loss_slopes(objective: Objective, phi: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Losses (K,), detached, and W (K, b, m): d loss_k / d phi, in one vectorised pass over the loss alone."""
    leaf = phi.detach().requires_grad_()
    losses = objective.loss(leaf, rows)
    (slopes,) = torch.autograd.grad(losses, leaf, torch.eye(len(losses), device=phi.device), is_grads_batched=True)
    return losses.detach(), slopes


@dataclass
class PerRewardGradients:
    """Filled micro-batch by micro-batch, on the device.

    gradients: (columns, size) of each loss, and a last row of what all of them share if the objective has a `basis`.
    signal: (columns,) sum of |A_k| over the step's rows.
    penalised: the penalty's gradient is in `.grad`.
    counts: (2, columns) the step's rows, and those of them to which each reward applies, over which its gradient is
        then the mean; None: it stays the mean over all rows.
    """

    gradients: Tensor
    signal: Tensor
    penalised: bool = False
    counts: Tensor | None = None

    def see(self, rows: Rows) -> None:
        """Count a micro-batch."""
        self.signal += rows.advantages.abs().sum(0)
        if self.counts is not None:
            self.counts[0] += len(rows.t)
            self.counts[1] += len(rows.t) if rows.known is None else rows.known.sum(0)

    def summed(
        self, parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Array, np.ndarray]:
        """Over all processes: gradients (columns, size), their Gram matrix in float64, and which have a signal.

        The penalty's gradient in `.grad` is reduced, too.
        """
        columns = len(self.signal)
        if reduce is not None:
            # Row by row: each is a whole LoRA, and a sum of all at once would need the memory of all again.
            for row in self.gradients:
                row.copy_(reduce(row))
            self.signal = reduce(self.signal)
            self.counts = None if self.counts is None else reduce(self.counts)
            if self.penalised:
                for parameter in parameters:  # a process without penalised rows has none
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                SumOfLosses().finish(parameters, reduce)
        each = self.gradients[:columns]
        if len(self.gradients) > columns:
            each += self.gradients[columns]
        if self.counts is not None:
            each *= (self.counts[0] / self.counts[1].clamp_min(1))[:, None]
        gram = gram_matrix(each)
        known = torch.cat([gram, self.signal.to(gram.device).double()[:, None]], dim=1)
        known = known.cpu()  # the only wait for the device in an optimiser step: the QP is solved on the host
        return each, known[:, :-1].numpy(), known[:, -1].numpy() > 0
