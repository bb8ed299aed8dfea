"""GARDO's penalty: beta times the divergence of few rows, whose references are computed ahead (arXiv 2512.24138)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from diffrl.forward import Prediction
from diffrl.objectives.objective import Objective, OptimiserStep
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy

Normalise = Literal["rows", "gated"]


class GatedReferences:
    """`beta` times the divergence of the judged rows, by the penalty of `base`: its anchor and its divergence.

    Args:
        gated: False: the base's own penalty on every row, of which only the divergence is noted.
        normalise: "rows": the mean over a step's rows, of which most have none; "gated": over the penalised rows.
    """

    def __init__(self, base: Objective, *, gated: bool, normalise: Normalise) -> None:
        self.objective, self.penalty, self.beta = base, base.penalty, base.penalty.beta
        self.means = base.means
        self.gated, self.normalise = gated and self.beta != 0, normalise
        self.kl = torch.zeros(2)  # [sum, count] of the step's KL, on the policy's device
        self.seen = self.forwards = 0  # trained rows, and reference forwards of them, since the last `saved`
        self._weight: float | Tensor = self.beta
        self._anchors: Prediction | None = None  # of the step's penalised rows
        self._slots = torch.empty(0)  # (n, T) int64 on the CPU: where a pair's anchor is in them, or -1

    def judge(self, policy: Policy, step: OptimiserStep, gate: Tensor | None) -> None:
        """Reference forwards of the rows of the gated samples (N,), as many at once as a micro-batch has rows."""
        self.kl = torch.zeros(2, device=policy.device)
        self.seen += sum(len(part) for part in step.parts)
        if self.beta != 0:  # every process logs the same names, also one that has no penalised row
            self.means.add("gardo/kl_gated", torch.zeros(0, device=policy.device))
        if not self.gated:
            return
        assert gate is not None, "advantages() runs before the first step"
        rollout, pairs = step.rollout, torch.cat(list(step.parts))
        chosen = pairs[gate[rollout.first + pairs[:, 0]]]
        self._slots = torch.full((len(rollout.member), self.objective.rows_per_sample(rollout)), -1)
        self._slots[chosen[:, 0], chosen[:, 1]] = torch.arange(len(chosen))
        if self.normalise == "gated":
            counts = step.reduce(torch.tensor([len(pairs), len(chosen)], device=policy.device, dtype=torch.float32))
            self._weight = self.beta * counts[0] / counts[1].clamp_min(1)
        anchors = []
        with policy.uneven_forwards():  # ranks may run different numbers of forwards
            for part in chosen.split(len(step.parts[0])) if len(chosen) else ():
                rows = self.objective.rows(rollout, step.advantages, part, step.key)
                anchors.append(self.penalty.anchor(policy, rows))
        self.forwards += len(chosen)
        self._anchors = _joined(anchors)

    def __call__(self, policy: Policy, rows: Rows) -> Tensor | None:
        """(b,) `beta * KL` of the penalised rows and 0 of the others; None if the micro-batch has none."""
        if self.beta == 0:
            return None
        if not self.gated:
            penalty = self.penalty(policy, rows)
            self.forwards += len(rows.t)
            if penalty is not None:
                self._observe(penalty.detach() / self.beta)
            return penalty
        slots = self._slots[rows.pairs[:, 0], rows.pairs[:, 1]]
        here = (slots >= 0).nonzero().flatten()
        if not len(here) or self.means.pausing:
            return None
        assert self._anchors is not None
        kl = self.penalty.divergence(policy, rows.select(here), _selected(self._anchors, slots[here]))
        self._observe(kl.detach())
        return kl.new_zeros(len(slots)).index_add(0, here.to(kl.device, non_blocking=True), self._weight * kl)

    def _observe(self, kl: Tensor) -> None:
        self.means.add("gardo/kl_gated", kl)
        self.kl = self.kl + torch.stack([kl.sum(), kl.new_full((), len(kl))])

    def forget(self) -> None:
        """The step's references."""
        self._anchors = None

    def saved(self) -> Tensor:
        """[rows without a reference forward, rows] since the last call."""
        counts = torch.tensor([float(self.seen - self.forwards), float(self.seen)], device=self.kl.device)
        self.seen = self.forwards = 0
        return counts


def _joined(parts: Sequence[Prediction]) -> Prediction | None:
    if not parts:
        return None
    return Prediction(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x0", "eps", "v")))


def _selected(prediction: Prediction, index: Tensor) -> Prediction:
    index = index.to(prediction.v.device, non_blocking=True)
    return Prediction(prediction.x0[index], prediction.eps[index], prediction.v[index])
