"""The learning rate of an optimiser step: warm-up, then constant or a decay to 0 at the run's last step.

A function of the step alone, which every checkpoint has: nothing else must be saved, a resumed run goes on exactly,
and one with more epochs goes on along the longer curve. The curves are those of `transformers.get_scheduler`, with one
difference: its warm-up begins at 0, so that the first step changes nothing; this one begins at 1 / warmup.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class LearningRate:
    """`base` times a factor in (0, 1]; `warmup` and `total` are counted in optimiser steps."""

    base: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    total: int = 0

    @property
    def varies(self) -> bool:
        return self.schedule != "constant" or self.warmup > 0

    def at(self, step: int) -> float:
        """The learning rate of the step after `step` steps."""
        if step < self.warmup:
            return self.base * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.base
        done = min((step - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        return self.base * (1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)

    def set(self, optimiser: torch.optim.Optimizer, step: int) -> None:
        """Before the step after `step` steps; one that does not vary is left as it is."""
        if self.varies:
            for group in optimiser.param_groups:
                group["lr"] = self.at(step)

    def metrics(self, step: int) -> dict[str, float]:
        """`lr` of the last of `step` steps, where it varies."""
        return {"lr": self.at(max(step - 1, 0))} if self.varies else {}
