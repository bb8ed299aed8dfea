"""Credit over the steps, as a type: what a method gives in the place of one advantage for all steps of a path.

Symbols as in `diffrl.objectives.objective`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from diffrl.denoising import SamplePlan
    from diffrl.objectives.advantages import AdvantageRule, ScoredBatch
    from diffrl.rollout import Rollout
    from diffrl.samplers import SamplerSpec


class Credit(Protocol):
    """Credit over the steps: which plan a rollout follows, and (N, T, columns) advantages of the scored views.

    It is a part of GRPO; see `diffrl.methods.dense.credit`, `branches` and `tree`.
    """

    selects: bool  # are rows left out?

    def share(self, group: int) -> float:
        """The share of the rows that is trained."""

    def plan(self, spec: SamplerSpec) -> SamplePlan: ...

    def rows_per_sample(self, rollout: Rollout) -> int:
        """T."""

    def advantages(self, rule: AdvantageRule, scored: ScoredBatch) -> Tensor:
        """(N, T, columns)."""

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """The (local sample, row number) pairs that are trained of these samples, advantages (n, T, columns)."""
