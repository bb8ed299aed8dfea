"""Reward-weighted regression (Flow-RWR, arXiv 2501.13918) and best-of-group fine-tuning, online.

symbol     name here      meaning
e_theta    phi[:, 0]      mean over dims of (v_theta - v)^2 at a random t and eps
W          advantages     the image's weight: softmax(r / tau) x G, exp(A / tau), r + l, or 1 for a group's best

    L = W e_theta, or with weights W + dW by latent cells (`diffrl.methods.shared.regions`)
        W e_theta + mean over cells of dW e_theta(cell)

A weight of 0 learns nothing, so "best" (fine-tuning on the best of each group) forwards one image of G,
or all that tie.
Published Flow-RWR weighs by exp(r) and has no factor (1 - t)^2; Flow-GRPO's baseline weighs by the raw reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from diffrl.advantages import group_advantages
from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.rwr import RWRSection
from diffrl.methods.shared.coupling import best_of_group, chosen_pairs, own_error
from diffrl.methods.shared.spatial import Spatial, SpatialRows
from diffrl.objectives.noising import Noising
from diffrl.objectives.objective import Cost
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy
from diffrl.rollout import Rollout

Weights = Literal["softmax", "exp", "linear", "best"]
CONSTRAINT = 0.5  # l


def reward_weights(scores: Tensor, groups: Tensor, std: str = "group", *, weights: Weights, tau: float) -> Tensor:
    """(N, K) weights of the scores (N, K), 0 where one does not apply.

    "softmax": softmax(r / tau) over the group times its number of known scores, so the mean is 1. "exp": exp(A / tau)
    of the advantage under `std`, at most e^5. "linear": r + CONSTRAINT (SRUM, arXiv 2510.12784), which may be negative.
    "best": 1 for a group's best and for what ties with it.
    """
    if weights == "linear":
        return (scores + CONSTRAINT).nan_to_num(0.0)
    if weights == "best":
        return best_of_group(scores, groups)
    if weights == "exp":
        row_weights = (group_advantages(scores, groups, std) / tau).clamp(max=5.0).exp()  # type: ignore[arg-type]
        return row_weights.masked_fill(scores.isnan(), 0.0)
    row_weights = torch.zeros_like(scores)
    for group in groups.unique():
        rows = groups == group
        group_scores = scores[rows]
        share = (group_scores / tau).masked_fill(group_scores.isnan(), -torch.inf).softmax(0).nan_to_num(0.0)
        row_weights[rows] = share * (~group_scores.isnan()).sum(0)
    return row_weights


class Regression(Spatial):
    """Each image has its own t and eps."""

    selects = True

    def __init__(self, keys: RWRSection | None = None, **values: Any) -> None:
        keys = RWRSection.of(keys, values)
        super().__init__(beta=keys.beta, noising=Noising.of(keys))
        self.best = keys.weights == "best"
        self.rule = replace(self.rule, estimate=partial(reward_weights, weights=keys.weights, tau=keys.tau))

    def see_regions(self, columns: Sequence[int], names: Sequence[str]) -> None:
        super().see_regions(columns, names)
        assert self.regions is not None, "there are some now"
        self.regions.scale = lambda scores, groups, std: torch.ones_like(scores)  # weights are scores, and a constant

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        return Cost(share=1 / rollout.group_size if self.best else 1.0)

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        if self.regions is not None:
            return super().pairs(rollout, advantages, samples, epoch)
        return chosen_pairs(advantages, samples, self.rows_per_sample(rollout))

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        assert isinstance(rows, SpatialRows), "rows() makes them"
        phi = own_error(policy, rows)
        if rows.cells is None:
            return phi
        assert rows.prediction is not None
        errors = (rows.prediction.v - rows.velocity(policy.process)).square().mean(1)
        return torch.cat([phi, (rows.cells * errors[:, None]).mean((2, 3))], dim=1)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        assert isinstance(rows, SpatialRows), "rows() makes them"
        self.means.add("rwr/error", phi[:, 0])
        losses = rows.advantages * phi[:, :1]
        return (losses if rows.cells is None else losses + phi[:, 1:]).sum(0)
