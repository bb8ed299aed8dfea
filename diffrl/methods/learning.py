"""Rewards that learn, in a run: before training on the untrained model's images, then once an epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from diffrl.objectives.advantages import ScoredBatch
from diffrl.process_state import unchanged_by
from diffrl.reward_kinds import learning
from diffrl.rollout import Rollout
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook
from diffrl.run.source import Rollouts


class LearningRewards(RunHook):
    """The rewards of the training scorer that learn, each with what it has observed."""

    name = "learning"

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts, self.rewards = rollouts, learning.of(rollouts.scorer.rewards)

    def begin(self, epoch: int) -> None:
        """Warm start: they learn from one epoch of the base model's images, which are not used for the policy.

        So the first epoch's scores say something, and there is a first state by which all epochs can be compared.
        """
        if epoch == 0 and any(reward.first is None for reward in self.rewards.values()):
            self.rollouts.monitor.status("rewards learn from the model's own images")
            self.rollouts.beside("learning")
            self._learn()

    def after_rollout(self, epoch: int, rollout: Rollout, scored: ScoredBatch) -> Mapping[str, float | None]:
        return self._learn()

    def _learn(self) -> dict[str, float]:
        mark, processes = time.perf_counter(), self.rollouts.processes
        figures = dict[str, float]()
        for name, reward in self.rewards.items():
            with unchanged_by(name):
                figures |= {f"learning/{name}/{key}": value for key, value in reward.learn(processes.sum).items()}
        processes.clock.add("reward", mark)
        return figures

    def state_dict(self) -> dict[str, Any]:
        with unchanged_by(", ".join(self.rewards)):
            return dict(learning.states(self.rewards))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with unchanged_by(", ".join(self.rewards)):
            learning.restore(self.rewards, state)


def add_learning(build: Build) -> None:
    build.add(LearningRewards(build.rollouts))
