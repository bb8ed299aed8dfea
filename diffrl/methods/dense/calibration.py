"""DenseGRPO's calibrated noise (arXiv 2601.20218): before training, each step's level is moved until gains balance.

One round draws an epoch's images under the present levels psi(t), scores all views, and moves every step's level by
`CHANGE`: up where about as many images gained as lost, else down. Then psi is frozen; it is in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffrl.advantages import weighted_sum
from diffrl.methods.dense.credit import Dense, calibrated, gains_of
from diffrl.rewards.compose import ScoreTransform
from diffrl.run.hooks import RunHook
from diffrl.run.source import Rollouts
from diffrl.samplers import schedule

TOP = 5.0
TOLERANCE = 2.0  # e1: gains are balanced up to so many deviations of a fair coin
CHANGE = 0.01  # e2: how far a level moves in a round


def start_levels(schedule: list[float], strength: float) -> list[float]:
    """psi at the start: Flow-GRPO's a sqrt(t / (1 - t)) at each step; the paper does not say where it starts."""
    second = schedule[1]
    return [min(strength * (t / (1 - (second if t >= 1 else t))) ** 0.5, TOP) for t in schedule[:-1]]


class Calibration(RunHook):
    """Finds the noise levels of `rollouts.spec`, once; every process finds the same ones, since it sees all scores."""

    name = "calibration"

    def __init__(self, rollouts: Rollouts, compose: ScoreTransform, weights: Tensor, rounds: int) -> None:
        self.rollouts, self.compose, self.weights, self.rounds = rollouts, compose, weights, rounds

    def begin(self, epoch: int) -> None:
        """The first view is drawn here also where the group shares its noise: the first step's gain needs it."""
        rollouts, credit = self.rollouts, self.rollouts.objective.credit
        if rollouts.spec.noise_levels is not None:
            return
        assert isinstance(credit, Dense)
        sigmas = schedule(rollouts.policy, rollouts.spec).tolist()
        levels = start_levels(sigmas, rollouts.spec.noise)
        common, credit.common = credit.common, False
        try:
            for number in range(self.rounds):
                rollouts.monitor.status(f"calibrating the noise, round {number + 1}/{self.rounds}")
                self._use(levels)
                levels = self._moved(levels, number)
        finally:
            credit.common = common
        self._use(levels)

    def _use(self, levels: list[float]) -> None:
        self.rollouts.spec = self.rollouts.spec.with_levels(levels)

    def _moved(self, levels: list[float], number: int) -> list[float]:
        """The levels after a round."""
        rollout, views, _ = self.rollouts.beside(f"calibration-{number}")
        everything = self.rollouts.processes.gather(views.flatten(1)).unflatten(1, views.shape[1:])
        groups = torch.arange(rollout.total) // self.rollouts.group_size
        members = groups[:, None] * views.shape[1] + torch.arange(views.shape[1])
        composed = self.compose(everything.flatten(0, 1), members.flatten())[:, : len(self.weights)]
        total = weighted_sum(composed, self.weights).view(len(groups), -1, 1)
        gains = gains_of(total, common=False)[..., 0]
        return calibrated(levels, gains[~gains.isnan().any(1)], TOLERANCE, CHANGE, TOP)

    def state_dict(self) -> dict[str, Any]:
        return {"levels": self.rollouts.spec.noise_levels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("levels") is not None:
            self._use(list(state["levels"]))
