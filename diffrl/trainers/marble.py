"""MARBLE: several rewards balanced in gradient space (arXiv 2605.06507), with any objective.

symbol       name here           meaning
K            rewards             rewards that are balanced
A_k          rows.advantages     (b, K), of each reward alone; 0 where it does not apply
g_k          bank[k]             gradient of reward k's loss, over the step's rows and processes
g^_k         -                   g_k / ||g_k||
alpha*       min_norm_weights    argmin over the simplex of || sum_k alpha_k g^_k ||^2
abar         ema                 alpha* smoothed: abar <- rho abar + (1 - rho) alpha*
d            -                   (sum_k abar_k g^_k) * mean_k ||g_k||, to which the penalty's gradient is added
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from diffrl.gradients import LoraGradients, Passes, gram_matrix
from diffrl.policy import Policy
from diffrl.simplex import Array, min_norm_weights
from diffrl.trainers.algorithm import AdvantageRule, Objective, Rows, SumOfLosses

Mode = Literal["fresh", "full", "amortised", "uniform", "sequential", "advantages", "sum"]
TOTALS: dict[str, Literal["rewards", "advantages"]] = {"sum": "rewards", "advantages": "advantages"}


def set_columns(rule: AdvantageRule, mode: Mode, measure: bool) -> None:
    """Which columns the advantages have: one for each reward, and in the modes of `TOTALS` a last one of all together.

    Such a total alone, which is trained as if there was one reward, where nothing is measured.
    """
    rule.total = TOTALS.get(mode)
    rule.each = rule.total is None or measure


def loss_slopes(objective: Objective, phi: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Losses (K,), detached, and W (K, b, m): d loss_k / d phi, in one vectorised pass over the loss alone."""
    leaf = phi.detach().requires_grad_()
    losses = objective.loss(leaf, rows)
    (slopes,) = torch.autograd.grad(losses, leaf, torch.eye(len(losses), device=phi.device), is_grads_batched=True)
    return losses.detach(), slopes


def basis_of(objective: Any) -> Sequence[Sequence[float]] | None:
    """The objective's own directions in the space of phi, see `Passes`; also of one that is wrapped (`base`)."""
    if hasattr(objective, "basis"):
        return objective.basis  # type: ignore[no-any-return]
    return basis_of(objective.base) if hasattr(objective, "base") else None


@dataclass(frozen=True)
class Record:
    """What an optimiser step shows: coefficients (K,); norms and cosines to d (K,), NaN without signal or measure."""

    alpha: Array
    norm: Array
    cosine: Array

    def plain(self) -> dict[str, list[float | None]]:
        """In four digits, None for NaN."""
        named = {"alpha": self.alpha, "norm": self.norm, "cos": self.cosine}
        return {name: [None if np.isnan(x) else float(f"{x:.4g}") for x in row] for name, row in named.items()}


class Marble:
    """The `Gradients` that balance K rewards; see `diffrl.config.methods.Marble` for the modes.

    Gradients of all rewards come from the constant-cost path of `diffrl.gradients`, in mode "full" from K passes.
    Rewards without signal in a step, that is without an advantage other than 0, are left out of it and keep their
    smoothed coefficient; the others share the rest, and d is made of their coefficients scaled to sum 1. If no reward
    has a signal d is the mean gradient (the objective's own, which is the same for all then).

    "Amortised" solves in every `every`-th step. Between them one pass of `sum_k abar_k loss_k` goes back. For a loss
    that is affine in A this is the loss at `sum_k abar_k A_k` (the paper's Proposition 1), and it stays exact where
    advantages or ratios are clipped.

    Args:
        names: of the K rewards, for the metrics.
        steps_per_epoch: optimiser steps of an epoch, which `stage` and `uniform_after` are counted in.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        mode: Mode = "amortised",
        smoothing: float = 0.7,
        every: int = 10,
        stage: int = 10,
        uniform_after: int | None = None,
        measure: bool = True,
        steps_per_epoch: int = 1,
    ) -> None:
        self.names, self.mode, self.smoothing, self.every = list(names), mode, smoothing, every
        self.stage, self.uniform_after, self.measure = stage, uniform_after, measure
        self.steps_per_epoch = steps_per_epoch
        self.ema: Array = np.full(len(names), 1 / len(names))
        self.steps = 0
        self._records: list[Record] = []
        self._single = SumOfLosses()
        self._capture: LoraGradients | None = None
        self._passes: Passes | None = None
        self._bank: Tensor | None = None  # (K [+ 1 of a total] [+ 1 of what all share], size), within a step
        self._signal = torch.zeros(0)  # (K,) sum of |A_k| over the step's rows, on the device
        self._scaler: GradScaler | None = None
        self._penalised = False

    # ---- what this step does

    @property
    def epoch(self) -> int:
        return self.steps // self.steps_per_epoch

    @property
    def uniform(self) -> bool:
        """Whether coefficients are 1 / K now."""
        return self.mode == "uniform" or (self.uniform_after is not None and self.epoch >= self.uniform_after)

    def _fixed(self) -> Array:
        """Coefficients of the losses (K,) where none are solved for."""
        if self.mode == "sequential":
            return np.eye(len(self.names))[self.epoch // self.stage % len(self.names)]
        return np.full_like(self.ema, 1 / len(self.ema)) if self.uniform else self.ema

    def _one_pass(self) -> bool:
        """Whether the step is a single pass of a fixed mixture of the losses, without gradients of each reward."""
        if self.mode == "sequential":
            return not self.measure
        return self.mode == "amortised" and (self.uniform or self.steps % self.every != 0)

    # ---- the seam

    def add(self, objective: Objective, policy: Policy, rows: Rows, rows_of_step: int, scaler: GradScaler) -> Tensor:
        if self._one_pass():
            if self._single.weights is None:
                self._single.weights = torch.tensor(self._fixed(), dtype=torch.float32, device=policy.device)
            return self._single.add(objective, policy, rows, rows_of_step, scaler)
        capture, passes, bank = self._open(objective, policy, rows, scaler)
        phi = objective.scalars(policy, rows)
        losses, slopes = loss_slopes(objective, phi, rows)
        penalty = objective.penalty(policy, rows)
        kept = penalty is not None and penalty.requires_grad
        passes.run(
            capture,
            phi,
            slopes,
            bank,
            scaler.scale(phi.new_full((), 1 / rows_of_step)),
            skip_shared=rows.on_policy,
            direct=self.mode == "full",
            retain=kept,
        )
        total = losses[-1] if self.mode in TOTALS else losses.mean()
        if penalty is not None:
            if kept:
                scaler.scale(penalty.sum() / rows_of_step).backward()
            total = total + penalty.detach().sum()
        return total / rows_of_step

    def _open(
        self, objective: Objective, policy: Policy, rows: Rows, scaler: GradScaler
    ) -> tuple[LoraGradients, Passes, Tensor]:
        """What the backward passes of the step write to, and how; before the forward, which the capture has to see."""
        if self._capture is None or self._passes is None:
            self._capture = LoraGradients(policy.lora)
            self._passes = Passes(basis_of(objective), policy.device)
        if self._bank is None:
            columns = rows.advantages.shape[1]
            size = columns + self._passes.shared, self._capture.size
            self._bank = torch.zeros(size, device=policy.device)
            self._signal = torch.zeros(columns, device=policy.device)
            self._scaler, self._penalised = scaler, objective.beta != 0
        self._signal += rows.advantages.abs().sum(0)
        return self._capture, self._passes, self._bank

    def finish(self, parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor] | None) -> None:
        if self._bank is None:
            self._single.finish(parameters, reduce)
            unknown = np.full_like(self.ema, np.nan)
            self._records.append(Record(self._fixed(), unknown, unknown))
        else:
            direction = self._balance(self._bank, parameters, reduce)
            for parameter, part in zip(parameters, direction.split([p.numel() for p in parameters]), strict=True):
                own = part.view_as(parameter)
                parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
        self._bank = self._single.weights = None
        self.steps += 1

    def _balance(
        self, bank: Tensor, parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """d (size,) over all processes; the penalty's gradient in `.grad` is reduced, too."""
        columns = len(self._signal)
        if reduce is not None:
            # Row by row: each is a whole LoRA, and a sum of all at once would need the memory of all again.
            for row in bank:
                row.copy_(reduce(row))
            self._signal = reduce(self._signal)
            if self._penalised:
                for parameter in parameters:  # a process without penalised rows has none
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                self._single.finish(parameters, reduce)
        if len(bank) > columns:
            bank[:columns] += bank[columns]
        known = torch.cat([gram_matrix(bank[:columns]), self._signal.double()[:, None]], dim=1)
        known = known.cpu()  # the only wait for the device in an optimiser step: the QP is solved on the host
        coefficients = self._coefficients(known[:, :-1].numpy(), known[:, -1].numpy() > 0)
        return bank[:columns].T @ torch.from_numpy(coefficients).to(bank)

    def _coefficients(self, gram: Array, signal: np.ndarray) -> Array:
        """Factors (columns,) of the gradients in d, from their Gram matrix; updates the smoothed coefficients."""
        if not np.isfinite(gram).all():
            return np.full(len(gram), 1 / len(gram))  # the loop sees that d is not finite, and what to do about it
        rewards = len(self.names)
        norms = np.sqrt(np.diag(gram))
        active = (signal & (norms > 0))[:rewards]
        if self.mode in TOTALS:
            factors, alpha = np.eye(len(gram))[-1], np.full(rewards, np.nan)
        elif self.mode == "sequential":
            factors = alpha = self._fixed()
        elif not active.any():
            factors, alpha = np.full(rewards, 1 / rewards), self._fixed()
        else:
            used = self._solve(gram[np.ix_(active, active)], norms[active], active)
            factors, alpha = np.zeros(rewards), self._fixed()
            factors[active] = used / norms[active] * norms[active].mean()
        length = np.sqrt(max(factors @ gram @ factors, 0.0))
        towards = (gram @ factors)[:rewards] / np.maximum(norms[:rewards] * length, np.finfo(float).tiny)
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        shown = np.where(active, 1.0, np.nan)
        self._records.append(Record(alpha.copy(), norms[:rewards] / scale * shown, towards * shown))
        return factors

    def _solve(self, gram: Array, norms: Array, active: np.ndarray) -> Array:
        """Coefficients of the active rewards in this step, sum 1."""
        if self.uniform:
            return np.full(len(gram), 1 / len(gram))
        solved = min_norm_weights(gram / np.outer(norms, norms))
        left = 1 - self.ema[~active].sum()  # the others keep theirs
        self.ema[active] = self.smoothing * self.ema[active] + (1 - self.smoothing) * left * solved
        share = self.ema[active].sum()
        return self.ema[active] / share if share > 0 else solved

    # ---- what is logged and kept

    def metrics(self) -> dict[str, Any]:
        """Means over the epoch's steps, of `cos_min` the least; None where no step knows it. `marble/steps` has them
        one by one, as JSON: a list of {alpha, norm, cos}, each in the order of the rewards."""
        records, self._records = self._records, []
        if not records:  # all overflowed
            return {}
        alpha, norm, cosine = (np.array([getattr(r, name) for r in records]) for name in ("alpha", "norm", "cosine"))
        measured = cosine[~np.isnan(cosine).all(1)]
        steps = [row[~np.isnan(row)] for row in measured]  # rewards with signal
        least = [float(row.min()) for row in steps]
        values: dict[str, Any] = {}
        for k, name in enumerate(self.names):
            if self.mode not in TOTALS:
                values[f"marble/alpha/{name}"] = float(alpha[:, k].mean())
            values[f"marble/norm/{name}"] = _mean(norm[:, k][~np.isnan(norm[:, k])])
        values["marble/cos_min"] = min(least) if least else None
        values["marble/cos_mean"] = _mean([row.mean() for row in steps])
        values["marble/cos_var"] = _mean([row.var() for row in steps])
        values["marble/conflict"] = _mean([value < 0 for value in least])  # rate of steps against some reward
        values["marble/steps"] = json.dumps([r.plain() for r in records])
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"ema": self.ema.tolist(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ema, self.steps = np.array(state["ema"]), int(state["steps"])


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None
