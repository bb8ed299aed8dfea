"""GDRO: group-level direct reward optimisation (arXiv 2601.02036), online.

A group's k images are sorted by reward, best first; one t and one eps for all of them.

symbol       name here         meaning
s_i          phi[:, 0]         implicit reward -b (e_theta - e_ref), e = mean over dims of (v_. - v)^2
r            advantages        reward (group-centred: a constant changes nothing)
B_i          race              the members that are not better than i, i among them
q_i(j)       softmax(r / tau)  over B_i: soft Plackett-Luce targets
p_i(j)       softmax(s)        likewise
g            BEST              weight of e_theta of the best image

    L       = sum_i [ log sum_{m in B_i} exp s_m - sum_{j in B_i} q_i(j) s_j ] + g e_theta(best)
    dL/ds_j = sum_{i: j in B_i} (p_i(j) - q_i(j))  - [j best] g / b

k = 2 with tau -> 0 is DPO. Whether the paper's e is a mean or a sum over dims is not known, and so b is not either.

Where rewards differ, B_i is "from i on" in the paper's sorted list. Rewards of few values (OCR, GenEval) tie mostly,
and a list then has one of many orders, on which the slopes of all members would hang: by 12 % on average for 0/1
rewards in groups of 6. So a term begins at a tie's first place: equal images run the same race, one another included,
whose target gives them equal shares. The mean over all orders would need every subset of a tie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffrl.advantages import group_advantages
from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.gdro import GDROSection
from diffrl.methods.shared.coupling import GroupLoss, excess_error, grouped_noising, own_error
from diffrl.objectives.objective import Cost, Objective, OptimiserStep
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy

BEST = 0.5  # keeps the best image's likelihood


def plackett_luce_slopes(s: Tensor, r: Tensor, tau: float) -> Tensor:
    """dL/ds (..., k) of implicit rewards s (..., k) and rewards r (..., k), whatever their order; sums to 0."""
    race = r[..., None, :] <= r[..., :, None]  # (..., k, k): is j in B_i?

    def shares(values: Tensor) -> Tensor:
        return values[..., None, :].expand_as(race).masked_fill(~race, -torch.inf).softmax(-1)

    return (shares(s) - shares(r / tau)).sum(-2)


class GDRO(Objective):
    """Rollouts come from theta; the reference is the pretrained model."""

    whole_groups = True

    def __init__(self, keys: GDROSection | None = None, **values: Any) -> None:
        keys = GDROSection.of(keys, values)
        noising = grouped_noising(keys)
        super().__init__(advantage_std="none", noising=noising)
        # Centred, whatever std a method around it asks for.
        self.rule = replace(self.rule, estimate=lambda scores, groups, std: group_advantages(scores, groups, "none"))
        self.b, self.tau = keys.b, keys.tau
        self.coupling = GroupLoss(self._slopes)

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        return Cost(forwards=2)  # the trained LoRA's error and the reference's, before the step

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        self.coupling.measure(self, policy, step, lambda rows: (-self.b * excess_error(policy, rows, None),))

    def _slopes(self, measured: Tensor, advantages: Tensor, mine: Tensor) -> Tensor:
        s, r = measured[0][..., None], advantages[:, :, None]  # (P, G, T, 1) against (P, G, 1, K)
        implicit, rewards = (value.movedim(1, -1) for value in torch.broadcast_tensors(s, r))
        slopes = plackett_luce_slopes(implicit, rewards, self.tau).movedim(-1, 1)
        winner = (r == r.amax(1, keepdim=True)).float()
        known = (r.amax(1, keepdim=True) > r.amin(1, keepdim=True)).float()  # a group that agrees has no order
        for name, values in (("implicit", s), ("reward", r / self.tau)):
            std = values.std(dim=1, correction=0)
            self.means.add(f"gdro/{name}_std", std, mine[:, None, None].expand_as(std))
        return (slopes - winner / winner.sum(1, keepdim=True) * BEST / self.b) * known

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1): s without the reference's part, which is a constant."""
        return -self.b * own_error(policy, rows)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        return self.coupling.loss(phi, rows)
