"""DenseGRPO (arXiv 2601.20218): each step's own gain, from ODE continuations of every state.

symbol     name here        meaning
x0^_j      view j           the ODE's clean image from the state x_j; that of the last state is the sample itself
R_j        views            its (composed) score
dR_j       gains[:, j]      R_{j-1} - R_j, what the stochastic step x_j -> x_{j-1} gained
A_j        advantages       dR_j against the group's, step by step

Gains telescope: their sum is R_0 - R_T. With one initial noise for the group the first view is common to it and
cancels, so it is not drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.denoising import SamplePlan
from diffrl.methods.dense import DenseSection
from diffrl.methods.dense.plan import PerStepViews
from diffrl.methods.shared.credit import advantages_per_step, view_scores
from diffrl.objectives.advantages import AdvantageRule, ScoredBatch
from diffrl.objectives.minibatches import sample_pairs
from diffrl.rollout import Rollout
from diffrl.samplers import SamplerSpec


def gains_of(views: Tensor, common: bool) -> Tensor:
    """(N, T, K) gains of views (N, V, K), V = T + 1; or V = T where the first view, `common` to the group, is left out:
    then the first gain is R itself, which differs by what cancels in the group."""
    gains = views.diff(dim=1)
    return torch.cat([views[:, :1], gains], dim=1) if common else gains


def calibrated(levels: list[float], gains: Tensor, tolerance: float, step: float, top: float) -> list[float]:
    """The next noise levels psi(t) from gains (N, T) under the present ones: more noise where gains are balanced.

    `psi += e2 if |#(dR > 0) - #(dR < 0)| < e1 else psi -= e2`, within [e2, top]. Of n gains by a fair coin the
    difference deviates by sqrt(n), so e1 is `tolerance` sqrt(n): the paper's 2 is an absolute number for a number of
    trajectories that it does not give, and of 1,152 images almost no balanced ones differ by less.
    """
    won, lost = (gains > 0).sum(0), (gains < 0).sum(0)
    balanced = ((won - lost).abs() <= tolerance * (won + lost).sqrt()).tolist()
    moved = [level + (step if even else -step) for level, even in zip(levels, balanced, strict=True)]
    return [min(max(level, step), top) for level in moved]


class Dense:
    """The credit of DenseGRPO; `common`: the group shares its initial noise."""

    selects = False

    def __init__(self, *, common: bool) -> None:
        self.common = common

    @classmethod
    def of(cls, section: DenseSection, config: Config) -> Dense:
        return cls(common=config.rollout.same_noise)

    def share(self, group: int) -> float:
        return 1.0

    def plan(self, spec: SamplerSpec) -> SamplePlan:
        return PerStepViews(self.common)

    def rows_per_sample(self, rollout: Rollout) -> int:
        assert rollout.trajectory is not None
        return rollout.trajectory.t.shape[1]

    def advantages(self, rule: AdvantageRule, scored: ScoredBatch) -> Tensor:
        return advantages_per_step(rule, scored, gains_of(view_scores(scored), self.common))

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        return sample_pairs(samples, self.rows_per_sample(rollout))
