"""Diffusion-DPO (arXiv 2311.12908) and Flow-DPO with a constant b (2501.13918), online: pairs of generated images.

symbol         name here           meaning
x^w, x^l       A = +1, A = -1      best and worst image of a group (`best_and_worst`)
e_theta        own_error           mean over dims of (v_theta - v)^2 at one t and one eps for both
d              phi[:, 0]           e_theta - e_ref
c              pair_slopes         sigma(b/2 (d^w - d^l)), how wrong the pair still is

    L = -log sigma( -b/2 (d^w - d^l) ),      dL/dd^w = b/2 c,   dL/dd^l = -b/2 c

So with c measured before the step the loss b/2 c A d has the exact gradient, row by row. On velocities and with b
constant it is Flow-DPO; the derived b_t = b (1 - t)^2 hacks (its paper: text alignment wins 28 %, not 68 %).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from diffrl.config import preferences
from diffrl.policy import Policy
from diffrl.rollout import Rollout
from diffrl.trainers.algorithm import Objective, Step
from diffrl.trainers.coupled import Coupling, best_and_worst, chosen_pairs, excess_error, of_groups, own_error
from diffrl.trainers.defaults import defaults_of
from diffrl.trainers.rows import Rows, TimestepSampling


def pair_slopes(d: Tensor, advantages: Tensor, groups: int, b: float) -> tuple[Tensor, Tensor]:
    """dL/dd (N, T, K) of the pairs in `advantages` (N, K), +1, -1 and 0, and the margin d^l - d^w (P, T, K).

    d (N, T). Where a group has no pair both are 0.
    """
    a = advantages.view(groups, -1, 1, advantages.shape[1])  # (P, G, 1, K)
    gap = (a * d.view(groups, -1, d.shape[1], 1)).sum(1, keepdim=True)  # d^w - d^l, (P, 1, T, K)
    slopes = (b / 2 * torch.sigmoid(b / 2 * gap) * a).flatten(0, 1)
    return slopes, -gap[:, 0]


class DPO(Objective):
    """`reference`: the pretrained model, or the snapshot "old", which becomes theta every `follow` optimiser steps."""

    whole_groups = True
    selects = True

    @defaults_of(preferences.DPO)
    def __init__(
        self,
        *,
        b: float,
        follow: int | None,
        beta: float,
        timesteps: int | None,
        timestep_sampling: TimestepSampling,
        levels: int | None = None,
    ) -> None:
        noising = of_groups(timesteps, timestep_sampling, levels)
        super().__init__(beta=beta, advantage_std="none", noising=noising)
        self.rule.estimate = best_and_worst
        self.b, self.follow = b, follow
        self.anchor = None if follow is None else "old"
        self.snapshots = () if follow is None else ("old",)
        self.coupling = Coupling(self._slopes)

    def share(self, group: int) -> float:
        return 2 / group

    def forwards(self, split: bool, steps: int) -> float:
        return 2  # the trained LoRA's error and the reference's, before the step

    def beside(self, split: bool) -> bool:
        return False

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """Only what is in a pair: the other members are never forwarded."""
        return chosen_pairs(advantages, samples, self.rows_per_sample(rollout))

    def before_step(self, policy: Policy, step: Step) -> None:
        self.coupling.measure(self, policy, step, lambda rows: (excess_error(policy, rows, self.anchor),))

    def _slopes(self, measured: Tensor, advantages: Tensor, mine: Tensor) -> Tensor:
        slopes, margin = pair_slopes(measured[0].flatten(0, 1), advantages.flatten(0, 1), len(advantages), self.b)
        paired = ((advantages[:, :, None] > 0).any(1) & mine[:, None, None]).expand_as(margin)
        self.means.add("dpo/loss", -logsigmoid(self.b / 2 * margin), paired)
        self.means.add("dpo/accuracy", margin > 0, paired)
        return slopes.unflatten(0, advantages.shape[:2])

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1): e_theta. The reference's part of d is a constant, and its value is in the slopes already."""
        return own_error(policy, rows)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """Twice the rows' share: the mean over a step's rows is then the mean over its pairs."""
        return 2 * self.coupling.loss(phi, rows)

    def after_step(self, policy: Policy, step: int) -> None:
        super().after_step(policy, step)
        if self.follow is not None and step % self.follow == 0:
            policy.follow("old", 0.0)
