"""Earlier states of the policy, one of which is the reference (SePPO, arXiv 2410.05255).

State n is the trained LoRA after n * `every` optimiser steps, 0 the untrained one; the newest `size` of them are kept,
state n in the slot n modulo `size`. One is drawn for each epoch, all alike.
"""

from __future__ import annotations

import torch

from diffrl.policy import Policy
from diffrl.seeds import generator


class ReferenceHistory:
    """`names` are the snapshots, all of them untrained at first; `chosen` is this epoch's."""

    def __init__(self, size: int, every: int, seed: int = 0) -> None:
        self.names = tuple(f"past{slot}" for slot in range(size))
        self.every, self.seed = every, seed
        self.chosen = self.names[0]

    def after_step(self, policy: Policy, step: int) -> None:
        """A state more, in the place of the oldest, where it is time."""
        number, rest = divmod(step, self.every)
        if rest == 0:
            policy.ema_update(self.names[number % len(self.names)], 0.0)

    def after_epoch(self, step: int) -> None:
        """The next epoch's reference: a function of seed and step."""
        newest = step // self.every
        back = torch.randint(min(newest + 1, len(self.names)), (), generator=generator(self.seed, step, "ring"))
        self.chosen = self.names[(newest - int(back)) % len(self.names)]
