"""SRUM's regional scores (arXiv 2510.12784) as advantages of latent cells: what is right in an image is learned there.

symbol   name here         meaning
R(c)     rollout.maps      (n, h, w) a reward's map, resized to the latent's cells; NaN: it says nothing of the cell
s        scored.scores     the image's score by it: the mean of R(c)
A        rows.advantages   (b, K) the image's advantage, of s and whatever other rewards there are
g        _slopes           dA / ds at the group's statistics: the reward's weight over what A is divided by
dA(c)    rows.cells        (b, K, h, w)

    A(c) = A + dA(c),    dA(c) = g (R(c) - s),    0 where R(c) is NaN

So the mean over cells of A(c) is A: the image earns what it earned, and it is spread over its places. A map that is
constant changes nothing. An objective that trains on it has a loss that is a mean over cells, and puts

    mean_c [loss(c; A(c)) - loss(c; A)]

into a scalar of the row's own for each column (`phi`): so the loss stays a cheap function of few scalars, and MARBLE,
GARDO and penalties are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diffrl.advantages import Std, group_scale, weighted_sum
from diffrl.objectives.advantages import AdvantageRule, ScoredBatch
from diffrl.reward_kinds.mapped import known_means
from diffrl.rollout import Rollout


def centred_cells(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """(n, *size) float64: maps (n, H, W) as means over the latent's cells, less their own mean; 0 for what is NaN."""
    cells = known_means(maps.double(), size)
    return (cells - cells.nanmean((1, 2), keepdim=True)).nan_to_num(0.0)


class Regions:
    """Advantages of latent cells, from the maps of some rewards.

    Args:
        columns, names: of these rewards, among those that are optimised.
    """

    def __init__(self, columns: Sequence[int], names: Sequence[str]) -> None:
        self.columns, self.names = list(columns), list(names)
        # What a score's distance from the group's is divided by, (N, K) of scores, groups and std.
        self.scale: Callable[[Tensor, Tensor, Std], Tensor] = group_scale
        self._slopes = torch.empty(0)  # (rewards here, N, columns of advantages)
        self._cells: tuple[Rollout, Tensor] | None = None

    def see(self, rule: AdvantageRule, scored: ScoredBatch) -> None:
        """An epoch's scores, on which the advantages of its images are being made."""
        self._slopes = torch.stack([self._slope(rule, scored, column) for column in self.columns])

    def _slope(self, rule: AdvantageRule, scored: ScoredBatch, k: int) -> Tensor:
        """(N, columns) float64: what one unit of reward k's score adds to each column of an image's advantages."""
        groups, weights, columns = scored.groups, scored.weights.double(), []
        if rule.each:
            here = torch.zeros(scored.scores.shape[1], dtype=torch.float64)
            here[k] = weights[k]
            columns.append(here / self.scale(scored.scores * scored.weights, groups, rule.std).double())
        if rule.total == "advantages":
            total = (rule.estimate(scored.scores, groups, rule.std) * scored.weights).sum(1)
            of_all = 1.0 if rule.std == "none" else total.double().std(correction=0) + 1e-4
            columns.append(weights[k] / self.scale(scored.scores[:, k : k + 1], groups, rule.std).double() / of_all)
        elif rule.total == "rewards":
            summed = weighted_sum(scored.scores, scored.weights)
            columns.append(weights[k] / self.scale(summed, groups, rule.std).double())
        return torch.cat(columns, dim=1).nan_to_num(0.0)

    def of(self, rollout: Rollout, pairs: Tensor) -> Tensor:
        """dA (b, K, h, w) of the rows `pairs` (b, 2), float32 on the policy's device."""
        if self._cells is None or self._cells[0] is not rollout:
            size = (rollout.latents.shape[-2], rollout.latents.shape[-1])
            self._cells = rollout, torch.stack([centred_cells(rollout.maps[name], size) for name in self.names])
        sample = pairs[:, 0]
        slopes, cells = self._slopes[:, rollout.first + sample], self._cells[1][:, sample]
        spread = (slopes[..., None, None] * cells[:, :, None]).sum(0)
        return spread.to(rollout.latents.device, torch.float32, non_blocking=True)
