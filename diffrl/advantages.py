"""Group-wise advantages, aware of rewards that do not apply.

N samples, K rewards. `groups` (N,) are integer prompt-group identities: floats would collide across ranks. A NaN score
means "this reward does not apply to this prompt"; its advantage is 0, that is no signal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Std = Literal["group", "sample", "batch", "none"]


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """Mean of each sample's group, NaN-aware: (N, K) and (N,) to (N, K); NaN where a whole group is NaN."""
    _, index = torch.unique(groups, return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    known = ~values.isnan()
    total = values.new_zeros(count, values.shape[1]).index_add_(0, index, values.nan_to_num(0.0) * known)
    number = values.new_zeros(count, values.shape[1]).index_add_(0, index, known.to(values.dtype))
    return (total / number)[index]


def group_scale(scores: Tensor, groups: Tensor, std: Std = "group", floor: float = 1e-4) -> Tensor:
    """(N, K) float64, what `group_advantages` divides each score's distance from its group's mean by."""
    values = scores.double()
    return _scale(values, values - group_mean(values, groups), groups, std, floor)


def _scale(values: Tensor, centred: Tensor, groups: Tensor, std: Std, floor: float) -> Tensor:
    if std == "group":
        return group_mean(centred.square(), groups).sqrt() + floor
    if std == "sample":
        known = _group_sum((~values.isnan()).double(), groups)
        spread = (group_mean(centred.square(), groups) * known / (known - 1)).sqrt()
        return spread.where(spread > 1e-12, torch.inf) + 1e-8  # rounding is no spread
    if std == "batch":
        mean = values.nanmean(dim=0, keepdim=True)
        return ((values - mean).square().nanmean(dim=0, keepdim=True).sqrt() + floor).expand_as(values)
    return torch.ones_like(centred)


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
    return (centred / _scale(values, centred, groups, std, floor)).nan_to_num(0.0).to(scores.dtype)


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


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    _, index = torch.unique(groups, return_inverse=True)
    return values.new_zeros(int(index.max()) + 1, values.shape[1]).index_add_(0, index, values)[index]
