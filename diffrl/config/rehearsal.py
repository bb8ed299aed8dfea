"""The config's section of rehearsal on the pretrained model's own images; present = on."""

from __future__ import annotations

from typing import Any

from pydantic import FiniteFloat

from diffrl.config.base import Problem, Section, key


class RehearsalSection(Section):
    pool: int = key(256, "images of the pretrained model, drawn once before the training", "images", ge=1)
    weight: FiniteFloat = key(1.0, "weight of mean (v_theta - v)^2 on them, beside the objective's loss", gt=0)
    every: int = key(4, "one of them for every so many images of an optimiser step", "images", ge=1)
    micro_batch: int = key(16, "of them in a forward, at most", "rows", ge=1)

    def check(self, config: Any) -> None:
        if self.every > config.optimise.batch_size:
            text = f"{self.every}, but a step has {config.optimise.batch_size} images (optimise.batch_size)"
            raise Problem("rehearsal.every", f"{text}: none would be rehearsed")
