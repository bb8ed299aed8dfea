"""MARBLE: several rewards balanced in gradient space (arXiv 2605.06507), with any objective.

symbol       name here           meaning
K            rewards             rewards that are balanced
A_k          rows.advantages     (b, K), of each reward alone; 0 where it does not apply
g_k          Bank                gradient of reward k's loss, over the step's rows and processes
g^_k         -                   g_k / ||g_k||
alpha*       min_norm_weights    argmin over the simplex of || sum_k alpha_k g^_k ||^2
abar         ema                 alpha* smoothed, from the first one on: abar <- rho abar + (1 - rho) alpha*
d            -                   (sum_k alpha*_k g^_k) * mean_k ||g_k||, to which the penalty's gradient is added
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from diffrl.config import Config
from diffrl.config.methods import advantage_std
from diffrl.methods.marble import MarbleSection
from diffrl.methods.marble.bank import TOTALS, PerRewardGradients, loss_slopes
from diffrl.methods.marble.gradients import LoraGradients, Passes
from diffrl.methods.marble.metrics import Record, summary
from diffrl.methods.marble.simplex import Array, min_norm_weights
from diffrl.objectives.gradients import SumOfLosses, penalties
from diffrl.objectives.objective import Objective
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy

log = logging.getLogger("diffrl")


class Marble:
    """The `Gradients` that balance K rewards; see `MarbleSection` for the modes.

    Gradients come from the constant-cost path of `marble/gradients.py`, in mode "full" from K passes. Rewards
    without signal in a step, that is without an advantage other than 0, are left out of it and keep their smoothed
    coefficient; the others share the rest, and d is made of their coefficients scaled to sum 1. If no reward has a
    signal d is the mean gradient. g_k is the mean over the rows to which reward k applies, where `rows.known` says so.

    A solving step takes alpha* itself (Eq. 6 to 8), or abar (`smooth` "everywhere"). "Amortised" solves in every
    `every`-th step; between them one pass of `sum_k abar_k loss_k` over all rows goes back. For a loss that is affine
    in A this is the loss at `sum_k abar_k A_k` (Proposition 1), and it stays exact where advantages are clipped.

    Args:
        names: of the K rewards, for the metrics.
    """

    def __init__(self, names: Sequence[str], keys: MarbleSection | None = None, **values: Any) -> None:
        keys = MarbleSection.of(keys, values)
        self.names, self.mode, self.every = list(names), keys.mode, keys.every
        self.smoothing, self.smooth, self.measure = keys.smoothing, keys.smooth, keys.measure
        self.solved = False  # has it solved for coefficients yet?
        self.ema: Array = np.full(len(names), 1 / len(names))
        self.steps = 0
        self._records: list[Record] = []
        self._single = SumOfLosses()
        self._capture: LoraGradients | None = None
        self._passes: Passes | None = None
        self._bank: PerRewardGradients | None = None  # within a step; K columns, or K + 1 with a total
        self._space: Tensor | None = None  # the bank's memory, kept where new memory is slow
        self._scaler: GradScaler | None = None

    def _one_pass(self) -> bool:
        """Whether the step is a single pass of a fixed mixture of the losses, without gradients of each reward."""
        return self.mode == "amortised" and self.steps % self.every != 0

    def add(self, objective: Objective, policy: Policy, rows: Rows, rows_of_step: float, scaler: GradScaler) -> Tensor:
        if self._one_pass():
            rows.known = None
            if self._single.weights is None:
                self._single.weights = torch.tensor(self.ema, dtype=torch.float32, device=policy.device)
            return self._single.add(objective, policy, rows, rows_of_step, scaler)
        capture, passes, bank = self._open(objective, policy, rows, scaler)
        phi = objective.scalars(policy, rows)
        losses, slopes = loss_slopes(objective, phi, rows)
        penalty = penalties(objective, policy, rows)
        if policy.sharded and bank.penalised and (penalty is None or not penalty.requires_grad):
            penalty = 0 * phi.sum()  # a sharded network's passes are everybody's, also where no row is penalised
        kept = penalty is not None and penalty.requires_grad
        scale = scaler.scale(phi.new_full((), 1 / rows_of_step))
        how = {"skip_shared": rows.on_policy, "masked": rows.known is not None, "direct": self.mode == "full"}
        passes.run(capture, phi, slopes, bank.gradients, scale, retain=kept, **how)
        total = losses[-1] if self.mode in TOTALS else losses.mean()
        if penalty is not None:
            if kept:
                scaler.scale(penalty.sum() / rows_of_step).backward()
            total = total + penalty.detach().sum()
        return total / rows_of_step

    def _open(
        self, objective: Objective, policy: Policy, rows: Rows, scaler: GradScaler
    ) -> tuple[LoraGradients, Passes, PerRewardGradients]:
        """What the backward passes of the step write to, and how; before the forward, which the capture has to see."""
        if self._capture is None or self._passes is None:
            self._capture = LoraGradients(policy.lora, policy.backbone.folded)
            self._passes = Passes(objective.basis, policy.device)
        if self._bank is None:
            columns, device = rows.advantages.shape[1], policy.device
            gradients = self._zeros(columns + self._passes.shared, self._capture.size, device)
            # Modes that balance nothing are as one pass of the losses would be.
            counts = None if self.mode in TOTALS else torch.zeros(2, columns, device=device)
            held = any(penalty.beta for penalty in objective.penalties)
            self._bank = PerRewardGradients(gradients, torch.zeros(columns, device=device), held, counts)
            self._scaler = scaler
        self._bank.see(rows)
        return self._capture, self._passes, self._bank

    def _zeros(self, columns: int, size: int, device: torch.device) -> Tensor:
        """On a CPU the pages of fresh memory cost more than what is written to them; a GPU's rollouts need it back."""
        if device.type != "cpu":
            return torch.zeros(columns, size, device=device)
        if self._space is None:  # neither number changes while a run trains
            self._space = torch.empty(columns, size)
        return self._space.zero_()

    def finish(self, parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor] | None) -> None:
        if self._bank is None:
            self._single.finish(parameters, reduce)
            unknown = np.full_like(self.ema, np.nan)
            self._records.append(Record(self.ema, unknown, unknown))
        else:
            gradients, gram, signal = self._bank.summed(parameters, reduce)
            factors = torch.from_numpy(self._coefficients(gram, signal)).to(gradients, non_blocking=True)
            direction = gradients.T @ factors
            for parameter, part in zip(parameters, direction.split([p.numel() for p in parameters]), strict=True):
                own = part.view_as(parameter)
                parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
        self._bank = self._single.weights = None
        self.steps += 1

    def _coefficients(self, gram: Array, signal: np.ndarray) -> Array:
        """Factors (columns,) of the gradients in d, from their Gram matrix; updates the smoothed coefficients."""
        if not np.isfinite(gram).all():
            return np.full(len(gram), 1 / len(gram))  # the loop sees that d is not finite, and what to do about it
        rewards = len(self.names)
        norms = np.sqrt(np.diag(gram))
        active = (signal & (norms > 0))[:rewards]
        if self.mode in TOTALS:
            factors, alpha = np.eye(len(gram))[-1], np.full(rewards, np.nan)
        elif not active.any():
            factors, alpha = np.full(rewards, 1 / rewards), self.ema
        else:
            used = self._solve(gram[np.ix_(active, active)], norms[active], active)
            factors, alpha = np.zeros(rewards), self.ema.copy()
            alpha[active] = used * alpha[active].sum()
            factors[active] = used / norms[active] * norms[active].mean()
        length = np.sqrt(max(factors @ gram @ factors, 0.0))
        towards = (gram @ factors)[:rewards] / np.maximum(norms[:rewards] * length, np.finfo(float).tiny)
        towards *= length > 1e-7 * (factors @ norms)  # a shorter sum has cancelled: rounding, without a direction
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        shown = np.where(active, 1.0, np.nan)
        self._records.append(Record(alpha.copy(), norms[:rewards] / scale * shown, towards * shown))
        return factors

    def _solve(self, gram: Array, norms: Array, active: np.ndarray) -> Array:
        """Coefficients of the active rewards in this step, sum 1."""
        if self.mode == "uniform":
            return np.full(len(gram), 1 / len(gram))
        solved = min_norm_weights(gram / np.outer(norms, norms))
        left = 1 - self.ema[~active].sum()  # the others keep theirs
        memory = self.smoothing if self.solved else 0.0
        self.ema[active] = memory * self.ema[active] + (1 - memory) * left * solved
        self.solved = True
        share = self.ema[active].sum()
        return self.ema[active] / share if share > 0 and self.smooth == "everywhere" else solved

    def metrics(self) -> dict[str, Any]:
        records, self._records = self._records, []
        return summary(records, self.names, self.mode not in TOTALS)

    def state_dict(self) -> dict[str, Any]:
        return {"ema": self.ema.tolist(), "steps": self.steps, "solved": self.solved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ema, self.steps = np.array(state["ema"]), int(state["steps"])
        self.solved = bool(state["solved"])


def build_combiner(section: MarbleSection, config: Config) -> Marble | None:
    """None where there is one column of advantages."""
    if section.mode in TOTALS and not section.measure:
        return None
    std, owner = advantage_std(config)
    if section.mode == "amortised" and std == "none":  # its coefficients are of normalised gradients
        text = "between marble's solving steps the rewards of the largest scale decide; take batch or group"
        log.warning('%s is "none": %s', owner, text)
    return Marble(list(config.rewards), section)
