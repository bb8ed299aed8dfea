"""Preference models that learn where the policy's images score above reference pictures.

Shapes: B images, H x W pixels, n pairs of a reference and an image. A pair's gap is s(reference) - s(image).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.errors import UserError
from diffrl.reward_kinds.fingerprint import embedder
from diffrl.reward_kinds.learning import Reduce
from diffrl.rewards.protocol import Embedder, ability
from diffrl_zoo.clip import fit
from diffrl_zoo.loading import MadeOfAnother, inner
from diffrl_zoo.references import LearnsFromReferences, References

Inputs = tuple[Tensor, ...]  # of B images, whatever their scores are computed from
Pairs = tuple[Inputs, Inputs]  # the better ones and the worse ones


def pair_loss(gap: Tensor) -> Tensor:
    """(n,): `-log sigma(s_better - s_worse)`, log 2 for equal scores (Bradley and Terry 1952)."""
    return F.softplus(-gap)


class LearningPreference(MadeOfAnother, LearnsFromReferences):
    """What the rewards here share: an embedding reward `reward`, references, and at most `steps` steps an epoch."""

    def __init__(
        self, reward: str, references: str, steps: int, device: str | None, arguments: Mapping[str, Any]
    ) -> None:
        if steps < 1:
            raise UserError(f'reward "{self.name}": steps is {steps}, not at least 1')
        self.base: Embedder = embedder(inner(reward, device, arguments), reward)
        self.pool, self.steps = References(references, self.name), steps
        self.device, self.batch_size = ability(self.base, "device"), ability(self.base, "batch_size")
        self._observed: list[Pairs] = []  # of the epoch: references and images
        self._beside: list[Pairs] = []  # of the epoch: pairs that are learned from whatever they score

    @abstractmethod
    def scores(self, inputs: Inputs, first: bool = False) -> Tensor:
        """(B,) with its graph, as the model is now, or as it was when it had learned once."""

    @abstractmethod
    def inputs(self, images: Tensor, prompts: Sequence[str]) -> Inputs:
        """What `scores` needs of images (B, 3, H, W) in [0, 1]."""

    @abstractmethod
    def overtaken(self, gap: Tensor, mean: float) -> Tensor:
        """Which of n pairs the model learns from, by their gaps and the mean gap over all processes: bool (n,)."""

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1] as the model is now."""
        self._last = self.inputs(images, prompts)
        return self.scores(self._last)

    def score_first(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1] as the model was when it had learned once."""
        return self.scores(self.inputs(images, prompts), first=True)

    @torch.no_grad()
    def observe(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], keys: Sequence[int]
    ) -> None:
        """Keep training images (B, 3, H, W), and a reference for each, squashed to their size."""
        height, width = images.shape[-2:]
        drawn = self.pool.draw(prompts, metadata, keys)
        pictures = torch.cat([fit(picture[None], (height, width), "squash") for picture in drawn])
        self._observed.append((self.inputs(pictures, prompts), self._last))

    def learn(self, reduce: Reduce) -> dict[str, float]:
        """Learn from what was observed. Before the first step: the loss, the share of references that score above
        their images (`accuracy`) and the mean gap; and how many steps were taken."""
        observed, beside = self._observed, self._beside
        self._observed, self._beside = [], []
        figures: dict[str, float] = {}
        for step in range(self.steps):
            with torch.no_grad():
                gaps = [self.scores(better) - self.scores(worse) for better, worse in observed]
            gap = torch.cat([*gaps, self.learner.parameters[0].new_zeros(0)])
            sums = torch.stack([pair_loss(gap).sum(), (gap > 0).sum(), gap.sum(), gap.new_tensor(len(gap))])
            *totals, images = reduce(sums).tolist()
            loss, accuracy, mean = (total / max(images, 1.0) for total in totals)
            figures = figures or {"loss": loss, "accuracy": accuracy, "gap": mean}
            chosen = [self.overtaken(one, mean) for one in gaps]
            count = sum(int(one.sum()) for one in chosen)
            if float(reduce(gap.new_tensor([count]))) == 0:
                break
            pairs = [*(_rows(pair, rows) for pair, rows in zip(observed, chosen, strict=True) if rows.any()), *beside]
            losses = (pair_loss(self.scores(better) - self.scores(worse)).sum() for better, worse in pairs)
            self.learner.step(losses, count + sum(len(better[0]) for better, _ in beside), reduce)
            figures["steps"] = step + 1.0
        self.learner.remember()
        return {"steps": 0.0} | figures


def _rows(pairs: Pairs, chosen: Tensor) -> Pairs:
    better, worse = (tuple(one[chosen.to(one.device)] for one in side) for side in pairs)
    return better, worse
