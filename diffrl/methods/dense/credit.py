"""DenseGRPO (arXiv 2601.20218): each step's own gain, from ODE continuations of every state.

symbol     name here        meaning
x0^_j      view j           the ODE's clean image from the state x_j; that of the last state is the sample itself
R_j        views            its (composed) score
dR_j       gains[:, j]      R_{j-1} - R_j, what the stochastic step x_j -> x_{j-1} gained
A_j        advantages       dR_j against the group's, step by step

Gains telescope: their sum is R_0 - R_T. With one initial noise for the group the first view is common to it and
cancels, so it is not drawn. `credit` "level" takes R_{j-1} itself (the paper's weaker baseline), "min" the least gain
from the step on, PURE's (2504.15275) min-form in place of the sum: dense gains hack more, the paper says of itself.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.denoising import SamplePlan
from diffrl.methods.dense import DenseSection
from diffrl.methods.dense.plan import Gains
from diffrl.methods.shared.credit import by_row, views_of
from diffrl.objectives.advantages import AdvantageRule, Scored
from diffrl.objectives.minibatches import sample_pairs
from diffrl.rollout import Rollout
from diffrl.samplers import SamplerSpec

CreditKind = Literal["gain", "level", "min"]


def gains_of(views: Tensor, common: bool) -> Tensor:
    """(N, T, K) gains of views (N, V, K), V = T + 1; or V = T where the first view, `common` to the group, is left out:
    then the first gain is R itself, which differs by what cancels in the group."""
    gains = views.diff(dim=1)
    return torch.cat([views[:, :1], gains], dim=1) if common else gains


def credit_of(gains: Tensor, views: Tensor, kind: CreditKind) -> Tensor:
    """(N, T, K) by `kind`, see the module."""
    if kind == "level":
        return views[:, -gains.shape[1] :]
    if kind == "min":  # NaN, a score that does not apply, is in all steps or in none
        return gains.flip(1).cummin(dim=1).values.flip(1)
    return gains


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
    """The credit of DenseGRPO.

    Args:
        ode_steps: of a continuation, at most; None: all that are left (1 was worse than Flow-GRPO, 2 between).
        credit: see the module.
        common: the group shares its initial noise.
    """

    selects = False

    def __init__(self, keys: DenseSection | None = None, *, common: bool, **values: Any) -> None:
        keys = DenseSection.of(keys, values)
        self.common, self.ode_steps, self.credit = common, keys.ode_steps, keys.credit

    @classmethod
    def of(cls, section: DenseSection, config: Config) -> Dense:
        return cls(section, common=config.rollout.same_noise)

    def share(self, group: int) -> float:
        return 1.0

    def plan(self, spec: SamplerSpec) -> SamplePlan:
        return Gains(self.common, self.ode_steps)

    def rows_per_sample(self, rollout: Rollout) -> int:
        assert rollout.trajectory is not None
        return rollout.trajectory.t.shape[1]

    def advantages(self, rule: AdvantageRule, scored: Scored) -> Tensor:
        views = views_of(scored)
        return by_row(rule, scored, credit_of(gains_of(views, self.common), views, self.credit))

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        return sample_pairs(samples, self.rows_per_sample(rollout))
