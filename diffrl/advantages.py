"""Group-wise advantages, aware of rewards that do not apply.

N samples, K rewards. `groups` (N,) are integer prompt-group identities: floats would collide across ranks. A NaN score
means "this reward does not apply to this prompt"; its advantage is 0, that is no signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Std = Literal["group", "sample", "batch", "none"]
Agree = Literal["keep", "leave_out", "floor", "virtual", "blend"]


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """Mean of each sample's group, NaN-aware: (N, K) and (N,) to (N, K); NaN where a whole group is NaN."""
    _, index = torch.unique(groups, return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    known = ~values.isnan()
    total = values.new_zeros(count, values.shape[1]).index_add_(0, index, values.nan_to_num(0.0) * known)
    number = values.new_zeros(count, values.shape[1]).index_add_(0, index, known.to(values.dtype))
    return (total / number)[index]


def group_advantages(scores: Tensor, groups: Tensor, std: Std = "group", floor: float = 1e-4) -> Tensor:
    """`(R - mean_group) / (std + 1e-4)` per reward (Flow-GRPO, arXiv 2505.05470), NaN-aware.

    Args:
        scores: (N, K); NaN where a reward does not apply.
        groups: (N,) integer identities of the prompt groups.
        std: over the sample's own group ("group"), over all samples of the epoch ("batch", published as `global_std`),
            or no division ("none", GARDO): population standard deviation, as in Flow-GRPO's code. "sample": the group's
            sample standard deviation + 1e-8, as in the code of MixGRPO, G2RPO and BranchGRPO; 0 for a group of one.
        floor: added to the standard deviation.

    Returns:
        (N, K) advantages, 0 where the score is NaN.

    Raises:
        ValueError: if `groups` is not of an integer type.
    """
    if groups.is_floating_point():
        raise ValueError("groups must be integers: float identities collide")
    values = scores.double()
    centred = values - group_mean(values, groups)
    if std == "group":
        scale = group_mean(centred.square(), groups).sqrt() + floor
    elif std == "sample":
        known = _group_sum((~values.isnan()).double(), groups)
        spread = (group_mean(centred.square(), groups) * known / (known - 1)).sqrt()
        scale = spread.where(spread > 1e-12, torch.inf) + 1e-8  # rounding is no spread
    elif std == "batch":
        mean = values.nanmean(dim=0, keepdim=True)
        scale = (values - mean).square().nanmean(dim=0, keepdim=True).sqrt() + floor
    else:
        scale = torch.ones_like(centred)
    return (centred / scale).nan_to_num(0.0).to(scores.dtype)


Estimate = Callable[[Tensor, Tensor, Std], Tensor]  # (N, K) scores, (N,) groups, std -> (N, K) advantages


def decoupled_advantages(
    scores: Tensor, weights: Tensor, groups: Tensor, std: Std = "group", estimate: Estimate = group_advantages
) -> Tensor:
    """(N, 1) weighted sum of each reward's own advantages, by GDPO (arXiv 2601.05242): scores (N, K), weights (K,).

    Rewards are normalised before they are summed, so that none drowns another by its scale. The sum is divided by its
    own std over the epoch's batch (unless `std` is "none"), so that its size does not grow with K.
    """
    total = (estimate(scores, groups, std) * weights).sum(1, keepdim=True)
    return total if std == "none" else total / (total.std(correction=0) + 1e-4)


def weighted_sum(scores: Tensor, weights: Tensor) -> Tensor:
    """One score per sample, (N, K) and (K,) to (N, 1): the weighted sum of those rewards that apply; NaN if none does.

    Group centring removes what a reward adds to a whole prompt, so prompts with different sets of applying rewards
    stay comparable.
    """
    total = (scores * weights).nansum(dim=1, keepdim=True)
    return torch.where(scores.isnan().all(dim=1, keepdim=True), torch.nan, total)


def win_rates(scores: Tensor) -> Tensor:
    """w(R): the share of the other samples with a lower score, a tie counting one half, in O(N log N).

    Args:
        scores: (N, K); NaN where a reward does not apply. Only their order counts.

    Returns:
        (N, K) float64 in [0, 1], mean 1/2 over the known scores of a column; NaN stays NaN; 1/2 for an only score.
    """
    rates = torch.full(scores.shape, torch.nan, dtype=torch.float64)
    for column, rate in zip(scores.T, rates.T, strict=True):
        known = ~column.isnan()
        values = column[known].contiguous()
        ordered = values.sort().values
        lower = torch.searchsorted(ordered, values).double()
        not_higher = torch.searchsorted(ordered, values, right=True).double()  # the sample itself among them
        others = len(values) - 1
        rate[known] = (lower + not_higher - 1) / (2 * others) if others > 0 else torch.full_like(lower, 0.5)
    return rates


@dataclass(frozen=True)
class Estimator:
    """Group advantages with what to do where groups agree; called like `group_advantages`. All values are in units of
    the scores that it gets: those of one reward, or the weighted sum.

    agree: what a group without a spread gives (docs/advantages.md).
        "keep": nothing is done. "leave_out": no advantage where the group's std is at most `least`; the others are
        scaled up by their share, so that the mean is over them (DAPO, arXiv 2503.14476). "floor": the std that divides
        is at least `least`. "virtual": mean and std are those of the group and one more member that scored `top`, so a
        group that is wrong altogether is pushed away from (NGRPO, arXiv 2509.18851). "blend": w A + (1 - w) A_global,
        A_global being the group's mean among the groups' means over their std, w the entropy of the group's scores
        (told apart by `grain`) over that of G different ones (COPO, arXiv 2508.04138; the curve of w is ours: linear).
    beta: R - p over the density at the group's mean p of Beta(1 + a / 3, 1 + b / 3), in place of the std, where Beta(a,
        b) has mean and variance of the epoch's p (BNPO, arXiv 2506.02864); for scores in [0, 1], meant for 0 and 1.
    risk: (low, high, weight): scores become weight x clamp(R, q_0, q_low) / low + clamp(R, q_low, q_high) / (high -
        low), q being quantiles of the epoch: gradient of a mixed value at risk (RiskPO, arXiv 2510.00911; its bundles
        of prompts are the whole epoch here, its 1 + omega is `weight`).
    ban: (std, mean): no advantage where the group's std is below and its mean above (RationalRewards, 2604.11626).
    """

    agree: Agree = "keep"
    least: float = 1e-3
    top: float = 1.0
    grain: float = 0.01
    beta: bool = False
    risk: tuple[float, float, float] | None = None
    ban: tuple[float, float] | None = None

    def __call__(self, scores: Tensor, groups: Tensor, std: Std = "group") -> Tensor:
        values = scores.double()
        if self.risk is not None:
            values = risk_utility(values, *self.risk)
        mean = group_mean(values, groups)
        spread = group_mean((values - mean).square(), groups).sqrt()
        if self.beta:
            found = ((values - mean) / (beta_density(mean, groups) + 1e-4)).nan_to_num(0.0)
        elif self.agree == "floor" and std == "group":
            found = ((values - mean) / spread.clamp_min(self.least)).nan_to_num(0.0)
        elif self.agree == "virtual":
            found = virtual_advantages(values, groups, self.top, std)
        else:
            found = group_advantages(values, groups, std)
        if self.agree == "blend":
            share = agreement_entropy(values, groups, self.grain)
            overall = _among_groups(mean, groups, std).where(~values.isnan(), 0.0)
            found = share * found + (1 - share) * overall
        silent = torch.zeros_like(values, dtype=torch.bool)
        if self.agree == "leave_out":
            silent = spread <= self.least
        if self.ban is not None:
            plain = group_mean(scores.double(), groups)
            own = group_mean((scores.double() - plain).square(), groups).sqrt()
            silent = silent | ((own < self.ban[0]) & (plain > self.ban[1]))
        found = found.masked_fill(silent, 0.0)
        if self.agree == "leave_out":
            known = ~values.isnan()
            kept = (known & ~silent).sum(0, keepdim=True)
            found = found * known.sum(0, keepdim=True) / kept.clamp_min(1)
        return found.to(scores.dtype)


def virtual_advantages(values: Tensor, groups: Tensor, top: float, std: Std) -> Tensor:
    """Advantages (N, K) of values (N, K) against their group and one member more, which scored `top`.

    Population std, as everywhere here; the paper's code takes the sample's.
    """
    known = (~values.isnan()).double()
    count = _group_sum(known, groups)
    total, squares = _group_sum(values.nan_to_num(0.0), groups), _group_sum(values.nan_to_num(0.0).square(), groups)
    mean = (total + top) / (count + 1)
    variance = ((squares + top**2) / (count + 1) - mean.square()).clamp_min(0.0)
    centred = values - mean
    if std in ("group", "sample"):
        centred = centred / (variance.sqrt() + 1e-4)
    elif std == "batch":
        centred = centred / (variance.where(~values.isnan(), torch.nan).nanmean(0, keepdim=True).sqrt() + 1e-4)
    return centred.nan_to_num(0.0)


def agreement_entropy(values: Tensor, groups: Tensor, grain: float) -> Tensor:
    """(N, K) entropy of the group's scores, rounded to multiples of `grain`, over log of its size: 0 all agree, 1 all
    differ; of a group of one 0."""
    bins = (values / grain).round()
    result = torch.zeros_like(values)
    for group in groups.unique():
        rows = (groups == group).nonzero().flatten()
        for k in range(values.shape[1]):
            own = bins[rows, k]
            own = own[~own.isnan()]
            if len(own) < 2:
                continue
            share = own.unique(return_counts=True)[1].double() / len(own)
            result[rows, k] = float(-(share * share.log()).sum()) / math.log(len(own))
    return result


def beta_density(p: Tensor, groups: Tensor) -> Tensor:
    """(N, K) density of Beta(1 + a / 3, 1 + b / 3) at the group means p (N, K); a and b fit the moments of the groups'.

    Those parameters make the variance of the gradient least where p has the law Beta(a, b). Where all groups have one
    mean nothing can be fitted, and the density is 1.
    """
    result = torch.ones_like(p)
    _, first = _first_of_group(groups)
    for k in range(p.shape[1]):
        means = p[first, k]
        means = means[~means.isnan()]
        m, v = means.mean(), means.var(correction=0) if len(means) else p.new_zeros(())
        if len(means) < 2 or v <= 1e-12 or not 0 < m < 1:
            continue
        size = (m * (1 - m) / v - 1).clamp_min(1e-3)
        alpha, beta = 1 + m * size / 3, 1 + (1 - m) * size / 3
        inside = p[:, k].clamp(1e-6, 1 - 1e-6)
        log_norm = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
        result[:, k] = ((alpha - 1) * inside.log() + (beta - 1) * (1 - inside).log() - log_norm).exp()
    return result


def risk_utility(values: Tensor, low: float, high: float, weight: float) -> Tensor:
    """(N, K) scores whose plain gradient is that of `weight` x mean of the lowest `low` share + mean of the share from
    `low` to `high`; shares are quantiles of the known scores of a column."""
    result = values.clone()
    for column, out in zip(values.T, result.T, strict=True):
        known = column[~column.isnan()]
        if len(known) == 0:
            continue
        q_low, q_high = torch.quantile(known, torch.tensor([low, high], dtype=known.dtype))
        lower = column.clamp_max(q_low) / low if low > 0 else torch.zeros_like(column)
        out.copy_(weight * lower + column.clamp(q_low, q_high) / (high - low))
    return result


def _first_of_group(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's group as a number from 0, and the first sample of each group."""
    _, index = torch.unique(groups, return_inverse=True)
    first = torch.full((int(index.max()) + 1,), len(groups), dtype=torch.int64)
    return index, first.scatter_reduce(0, index, torch.arange(len(groups)), "amin")


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    _, index = torch.unique(groups, return_inverse=True)
    return values.new_zeros(int(index.max()) + 1, values.shape[1]).index_add_(0, index, values)[index]


def _among_groups(mean: Tensor, groups: Tensor, std: Std) -> Tensor:
    """(N, K): each group's mean less the mean over the groups, over their std unless `std` is "none"."""
    index, first = _first_of_group(groups)
    means = mean[first]
    centred = means - means.nanmean(0, keepdim=True)
    if std != "none":
        centred = centred / (centred.square().nanmean(0, keepdim=True).sqrt() + 1e-4)
    return centred.nan_to_num(0.0)[index]
