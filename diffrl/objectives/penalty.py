"""What holds an objective to a reference, beside its loss and outside of any balancing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffrl.forward import Prediction
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy

if TYPE_CHECKING:
    from diffrl.objectives.objective import Objective, OptimiserStep


class Penalty:
    """`beta * mean (v_theta - v_ref)^2` of every row: what holds an objective to its reference.

    The loop calls it as it calls the objective, and after it: another one may decide once an epoch whom it penalises
    (`see_epoch`), compute its references before a step, renew them after it, and keep a state.

    Args:
        objective: whose rows it penalises, and where its numbers are logged.
        beta: its weight; 0: no reference forward.
        guidance: of the pretrained model's prediction; None: that of the rows. A snapshot is a student, and students
            run without guidance: held to its guided prediction, each reset would ask for the guidance's step once more.
        name: its divergence is logged as this.
    """

    def __init__(self, objective: Objective, beta: float, guidance: float | None = None, name: str = "kl") -> None:
        self.objective, self.beta, self.guidance, self.name = objective, beta, guidance, name
        self.reference: str | None = None  # the snapshot that it refers to; None is the pretrained model
        # For estimates: of the rows, those that are penalised, and the most whose references are kept through a step.
        self.share, self.kept = 1.0, 0.0

    def anchor(self, policy: Policy, rows: Rows) -> Prediction:
        """What the rows are held to, without gradient: a forward of the reference."""
        guidance = rows.guidance if self.guidance is None or self.reference is not None else self.guidance
        with torch.no_grad(), policy.adapter(self.reference):
            return policy.predict(rows.x_t, rows.t, rows.cond, guidance)

    def divergence(self, policy: Policy, rows: Rows, anchor: Prediction) -> Tensor:
        """(b,) unweighted distance of the rows' predictions, which `scalars` left there, from `anchor`."""
        assert rows.prediction is not None, "scalars() runs before the penalty"
        return (rows.prediction.v - anchor.v).square().flatten(1).mean(1)

    def strength(self, rows: Rows) -> float | Tensor:
        """The weight, or one for each row (b,)."""
        return self.beta

    def __call__(self, policy: Policy, rows: Rows) -> Tensor | None:
        """(b,) weighted regulariser, its divergence being logged; None, and nothing computed, where beta is 0."""
        if self.beta == 0:
            return None
        kl = self.divergence(policy, rows, self.anchor(policy, rows))
        self.objective.means.add(self.name, kl)
        values = self.strength(rows) * kl
        return values[:0] if self.objective.means.pausing else values

    def see_epoch(self, scored: ScoredBatch) -> None: ...  # an epoch's scores, before advantages are made of them

    def before_step(self, policy: Policy, step: OptimiserStep) -> None: ...  # after the objective's own

    def after_step(self, policy: Policy, step: int) -> None: ...  # with the number of optimiser steps so far

    def metrics(self) -> dict[str, Tensor]:
        return {}  # as `Objective.metrics`, of what is not in the objective's means

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
