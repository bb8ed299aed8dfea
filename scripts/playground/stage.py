"""One training: a schedule over a given time, a state that is saved every minute, an average of the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SEED = 0
LossOf = Callable[[torch.Generator, float], tuple[Tensor, dict[str, float]]]


class Stage:
    """A training loop of `minutes` of work in all, continued from the last save.

    The learning rate rises over the first 200 steps, stays, and falls linearly to zero over the last `fall` of the
    time. So the schedule fits any machine; a run that is stopped before its end goes on where it stopped.
    `trained`: what learns; `model`, a part of it or all, is what is averaged (decay `decay`) and shipped.
    """

    def __init__(
        self, name: str, work: Path, model: nn.Module, trained: nn.Module, minutes: float,
        optimisers: list[torch.optim.Optimizer], fall: float = 0.6, decay: float = 0.999,
    ) -> None:  # fmt: skip
        self.name, self.model, self.trained, self.optimisers = name, model, trained, optimisers
        self.budget, self.fall = 60.0 * minutes, fall
        self.path = work / f"{name}.pt"
        self.average = torch.optim.swa_utils.AveragedModel(
            model, avg_fn=lambda old, new, n: old + (new - old) * max(1 - decay, 1 / (int(n) + 2)), use_buffers=True
        )
        self.step, self.seconds, self.images = 0, 0.0, 0
        self.rates = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
        if self.path.exists():
            self._load(torch.load(self.path, weights_only=True, map_location="cpu"))

    def _load(self, state: dict[str, Any]) -> None:
        self.step, self.seconds, self.images = state["step"], state["seconds"], state["images"]
        self.trained.load_state_dict(state["trained"])
        self.average.load_state_dict(state["average"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)

    def save(self) -> None:
        state: dict[str, Any] = {"step": self.step, "seconds": self.seconds, "images": self.images}
        state |= {"trained": self.trained.state_dict(), "average": self.average.state_dict()}
        state["optimisers"] = [optimiser.state_dict() for optimiser in self.optimisers]
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.path)

    def _schedule(self) -> None:
        done = self.seconds / self.budget
        factor = min((self.step + 1) / 200, 1.0, (1.0 - done) / self.fall)
        for optimiser, rates in zip(self.optimisers, self.rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * max(factor, 0.0)

    def run(self, loss_of: LossOf, batch: int) -> Any:
        """Train until the time is used up; returns the average of the weights. `loss_of` gets the share of it done."""
        saved = printed = time.monotonic()
        while self.seconds < self.budget:
            started = time.monotonic()
            self._schedule()
            # One generator per step: a resumed run draws what an undisturbed one would have drawn.
            generator = torch.Generator().manual_seed(SEED * 1_000_003 + self.step)
            loss, figures = loss_of(generator, self.seconds / self.budget)
            for optimiser in self.optimisers:
                optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.trained.parameters(), 1.0)
            for optimiser in self.optimisers:
                optimiser.step()
            self.average.update_parameters(self.model)
            self.step, self.images = self.step + 1, self.images + batch
            self.seconds += time.monotonic() - started
            now = time.monotonic()
            if now - printed > 20:
                extra = " ".join(f"{k} {v:.4f}" for k, v in figures.items())
                print(f"{self.name} {self.seconds:.0f}/{self.budget:.0f} s, step {self.step}, {extra}", flush=True)
                printed = now
            if now - saved > 60:
                self.save()
                saved = now
        self.save()
        return self.average.module.eval()
