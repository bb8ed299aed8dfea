"""How the losses of a micro-batch become gradients of the LoRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from diffrl.objectives.objective import Objective
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy


def penalties(objective: Objective, policy: Policy, rows: Rows) -> Tensor | None:
    """(b,) sum of the penalties; None if there is none."""
    terms = [values for one in objective.penalties if (values := one(policy, rows)) is not None]
    return sum(terms[1:], start=terms[0]) if terms else None


class Gradients(Protocol):
    """How the losses of a micro-batch become gradients of the LoRA: their sum, or K gradients balanced (MARBLE)."""

    def add(self, objective: Objective, policy: Policy, rows: Rows, rows_of_step: float, scaler: GradScaler) -> Tensor:
        """Backward of one micro-batch as its share of the step's mean over rows; returns that share, detached.
        `rows_of_step` is infinite for rows whose passes are run and count as nothing."""

    def finish(self, parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor] | None) -> None:
        """Leave the step's gradient over all processes in `parameters`; `reduce` sums over them (None: one only)."""

    def metrics(self) -> dict[str, Any]:
        """Numbers for the epoch's line of metrics.jsonl since the last call; the same on every process."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SumOfLosses:
    """The plain way: one backward of the summed losses and the penalty."""

    weights: Tensor | None = None  # (K,) factors of the losses, on the device; None: 1

    def add(self, objective: Objective, policy: Policy, rows: Rows, rows_of_step: float, scaler: GradScaler) -> Tensor:
        phi = objective.scalars(policy, rows)
        losses = objective.loss(phi, rows)
        total = losses.sum() if self.weights is None else losses @ self.weights
        penalty = penalties(objective, policy, rows)
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
