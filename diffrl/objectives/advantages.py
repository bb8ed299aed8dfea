"""From the scores of an epoch's N samples over all processes, by K rewards, to advantages, and what shapes these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffrl.advantages import Estimate, Std, decoupled_advantages, group_advantages, weighted_sum

# Which columns advantages have: one of the weighted sum of rewards, or of the weighted sum of advantages; one for each
# reward; or one for each, and the total last.
Columns = Literal["rewards", "advantages", "each", "each+rewards", "each+advantages"]


@dataclass(frozen=True)
class ScoredBatch:
    """An epoch's scores over all processes, in global sample order, on the CPU."""

    scores: Tensor  # (N, K), NaN where a reward does not apply
    weights: Tensor  # (K,) of the config
    groups: Tensor  # (N,) int64
    features: Tensor  # (N, F) of the diversity measure
    auxiliary: Tensor  # (N, A) of rewards that are read and never optimised (GARDO); A may be 0
    views: Tensor | None = None  # (N, V, K) scores of all views; `scores` are the final one's. None: there is one
    names: Sequence[tuple[int | str, ...]] = ()  # what each sample's random numbers are keyed by; none: its number


# advantages (N, columns) or (N, T, columns), and the scores that they are of, to advantages of the same shape
AdvantageTransform = Callable[[Tensor, ScoredBatch], Tensor]


@dataclass(frozen=True)
class AdvantageRule:
    """From scores to advantages; a method that is put around an objective gives it another one (`dataclasses.replace`).

    std: what advantages are divided by. estimate: what a group's scores become.
    """

    std: Std
    columns: Columns = "rewards"
    estimate: Estimate = group_advantages

    @property
    def each(self) -> bool:
        return self.columns.startswith("each")  # has each reward a column?

    @property
    def total(self) -> str | None:
        """What the column of all rewards together is of, if there is one: "rewards" or "advantages"."""
        return None if self.columns == "each" else self.columns.removeprefix("each+")

    def __call__(self, scored: ScoredBatch) -> Tensor:
        """(N, columns)."""
        groups, columns = scored.groups, []
        if self.each:  # the sizes of weights matter little to separate columns, their signs do
            columns.append(self.estimate(scored.scores * scored.weights, groups, self.std))
        if self.total == "advantages":
            columns.append(decoupled_advantages(scored.scores, scored.weights, groups, self.std, self.estimate))
        elif self.total == "rewards":
            columns.append(self.estimate(weighted_sum(scored.scores, scored.weights), groups, self.std))
        return torch.cat(columns, dim=1)

    def known(self, scored: ScoredBatch) -> Tensor:
        """(N, columns) bool: where a reward, or any of those of the total, applies."""
        known = ~scored.scores.isnan()
        total = [known.any(dim=1, keepdim=True)] if self.total is not None else []
        return torch.cat([known, *total] if self.each else total, dim=1)
