"""Rewards and objectives that learn, in a run: before training on the untrained model's images, then once an epoch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from diffrl.rewards.learning import Learning
from diffrl.rewards.offloading import Wrapper
from diffrl.rewards.protocol import Metadata, ability

if TYPE_CHECKING:
    from diffrl.run.loop import Loop


def learn(loop: Loop) -> dict[str, float]:
    """Every reward that learns does so on what it has observed: `learning/REWARD/...` of the epoch's metrics."""
    mark = time.perf_counter()
    figures = {
        f"learning/{name}/{key}": value
        for name, reward in loop.scorer.learning.items()
        for key, value in reward.learn(loop.processes.sum).items()
    }
    loop.clock.add("reward", mark)
    return figures


def meet(loop: Loop) -> None:
    """Before training: they learn on an epoch's images of the untrained model, which nothing else is trained on.

    So the first epoch's scores say something, and there is a first state by which all epochs can be compared. Then the
    objective learns, where it has something that does (`Objective.learn`).
    """
    if any(reward.first is None for reward in loop.scorer.learning.values()):
        loop.status("rewards learn from the model's own images")
        loop._rollout(0, key="learning")
        learn(loop)
    for number in range(loop.objective.warmup):
        loop.status("the objective learns from the model's own images")
        loop.warm_up(f"warm-up {number}")


class First(Wrapper):
    """A reward that learns as it was after it had learned for the first time: `REWARD_first` among the judges of
    held-out images, since its own scores move."""

    def __init__(self, reward: Learning) -> None:
        super().__init__(reward)
        self.learning = reward

    def applies(self, prompt: str, metadata: Metadata) -> bool:
        """Where the reward itself applies, once it has learned."""
        asked = ability(self.learning, "applies")
        return self.learning.first is not None and (asked is None or asked(prompt, metadata))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        assert self.learning.first is not None, "it does not apply before"
        return self.learning.first(images, prompts, metadata)
