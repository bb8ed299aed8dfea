"""What GARDO computes from scores and features: uncertainty, gate, its share, diversity shaping (arXiv 2512.24138).

N samples over all processes, K or A rewards; everything on the CPU. NaN: a reward that does not apply to a prompt.

symbol      name here           meaning
w(R)        win_rates           share of the other samples of the epoch's batch with a lower score, ties one half
U           uncertainty         w(R_proxy) - mean over the auxiliary rewards of w(R_aux)
k           GateShare.value     share of the samples that the gate lets the penalty act on
d_i         nearest_distance    min over the other members of the group of 1 - cos(e_i, e_j)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.advantages import group_mean, win_rates
from diffrl.seeds import noise

Diversity = Literal["off", "raw", "group_mean"]


def uncertainty(proxy: Tensor, auxiliary: Tensor) -> Tensor:
    """U (N,) in [-1, 1] of the proxy's scores (N,) and the auxiliary rewards' (N, A); high: only the proxy likes it.

    NaN where the proxy does not apply or no auxiliary reward does; those that do not are left out of the mean.
    """
    return win_rates(proxy[:, None])[:, 0] - win_rates(auxiliary).nanmean(dim=1)


def gate_of(u: Tensor, share: float, groups: Tensor | None = None, names: Sequence[Sequence[int | str]] = ()) -> Tensor:
    """Who is penalised, (N,) bool: of n uncertainties the ceil(share (n - 1)) highest, which for different values are
    those above their 1 - share quantile.

    Rewards of few values tie, also at the limit. A threshold that is not above itself lets the whole class go, and the
    larger the class of the most suspicious images, the surer; the whole class would be a penalty on more images than
    `share`, and so than memory is reckoned for. So as many as are missing are drawn by lot from those at the limit, by
    their names: whatever their order, on any number of processes. Images with U <= 0 are not drawn: no reward says that
    these are hacked rather than those.

    Args:
        u: (N,) uncertainties; NaN is never penalised.
        share: k in (0, 1].
        groups: (N,) integers for the share of each group (the paper); None for one of all U >= 0 (the authors' code),
            so that no sample is penalised that the auxiliary rewards rank above the proxy. An only one of them
            is, where its U is above 0.
        names: what the lot of each sample is keyed by; none: its number.
    """
    gate = torch.zeros(len(u), dtype=torch.bool)
    pools = [u >= 0] if groups is None else [(groups == group) & ~u.isnan() for group in groups.unique()]
    for pool in (pool.nonzero().flatten() for pool in pools):
        n, values = len(pool), u[pool].double()
        count = n - 1 - math.floor((1 - share) * (n - 1)) if n else 0
        least = 1 if groups is None and n else 0
        if not max(count, least):
            continue
        limit = values.sort(descending=True).values[max(count, least) - 1]
        gate[pool] = values > limit
        tied, missing = pool[values == limit], count - int((values > limit).sum())
        if len(tied) > missing and limit <= 0:
            continue
        keys = [("gate", *(names[i] if names else (i,))) for i in tied.tolist()]
        gate[tied[noise((), keys).argsort(stable=True)[: max(missing, least)]]] = True
    return gate


def nearest_distance(features: Tensor, groups: Tensor) -> Tensor:
    """d (N,) float64 in [0, 2]: cosine distance to the nearest other member of the group; inf in a group of one.

    features (N, F), groups (N,) integers.
    """
    e = F.normalize(features.double(), dim=1)
    distance = e.new_empty(len(e))
    for group in groups.unique():
        members = (groups == group).nonzero().flatten()
        apart = (1 - e[members] @ e[members].T).clamp_min(0)
        distance[members] = apart.fill_diagonal_(torch.inf).min(dim=1).values
    return distance


def shape_advantages(advantages: Tensor, distance: Tensor, groups: Tensor, diversity: Diversity) -> Tensor:
    """`A d` where A > 0, else A: (N, K). With "group_mean" d is divided by its mean over the group.

    A group of images that are all alike says nothing about who is different: "group_mean" leaves it as it is.
    """
    if diversity == "off":
        return advantages
    factor = distance[:, None]
    if diversity == "group_mean":
        mean = group_mean(factor, groups)
        factor = torch.where(mean > 1e-12, factor / mean, 1.0)
    return torch.where(advantages > 0, advantages * factor.to(advantages.dtype), advantages)


CHANGE = 0.1  # of the share, when it moves (paper)
WINDOW = 20  # epochs whose means it is compared with


@dataclass
class GateShare:
    """k, which follows the mean U of the last epochs: above all of them it grows, below all of them it shrinks.

    It moves at once, as in the authors' code (the paper: when the window is full), between a fifth and twice its first
    value: their limits of 0.02 and 0.2 for 0.1.
    """

    value: float = 0.1
    means: list[float] = field(default_factory=list)  # oldest first

    def __post_init__(self) -> None:
        self.limits = (self.value / 5, min(2 * self.value, 1.0))

    def follow(self, mean: float) -> None:
        """Take in an epoch's mean U; `value` is then that epoch's k."""
        if self.means and mean > max(self.means):
            self.value *= 1 + CHANGE
        elif self.means and mean < min(self.means):
            self.value *= 1 - CHANGE
        self.value = min(max(self.value, self.limits[0]), self.limits[1])
        self.means = [*self.means, mean][-WINDOW:]
