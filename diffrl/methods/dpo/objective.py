"""Diffusion-DPO (arXiv 2311.12908) and Flow-DPO with a constant b (2501.13918), online: pairs of generated images.

symbol         name here           meaning
x^w, x^l       A = +1, A = -1      best and worst image of a group (`best_and_worst`)
e_theta        own_error           mean over dims of (v_theta - v)^2 at one t and one eps for both
d              phi[:, 0]           e_theta - e_ref
c              pair_slopes         sigma(b/2 (d^w - d^l)), how wrong the pair still is

    L = -log sigma( -b/2 (d^w - d^l) ),      dL/dd^w = b/2 c,   dL/dd^l = -b/2 c

So with c measured before the step the loss b/2 c A d has the exact gradient, row by row. On velocities and with b
constant it is Flow-DPO; the derived b_t = b (1 - t)^2 hacks (its paper: text alignment wins 28 %, not 68 %).

SePPO (arXiv 2410.05255) changes three things. The reference is an earlier state of the policy
(`ReferenceHistory`), and it draws the images. On an image set x^w is the set's picture and x^l an image of the
reference (`rival`). And where the reference fits x^w better than theta does, x^l counts as a second winner
(`flipped`): with its sign s

    L = -log sigma( -b/2 (d^w - s d^l) ),      s = -1 where d^w > 0, else 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from diffrl.config.base import Section
from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.dpo import DPOSection
from diffrl.methods.dpo.reference_history import ReferenceHistory
from diffrl.methods.shared.coupling import (
    GroupLoss,
    best_and_worst,
    chosen_pairs,
    excess_error,
    grouped_noising,
    own_error,
)
from diffrl.objectives.objective import BuildContext, Cost, Objective, OptimiserStep
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy
from diffrl.rollout import Rollout


def pair_slopes(d: Tensor, advantages: Tensor, groups: int, b: float, flip: bool = False) -> tuple[Tensor, Tensor]:
    """dL/dd (N, T, K) of the pairs in `advantages` (N, K), +1, -1 and 0, and the margin s d^l - d^w (P, T, K).

    d (N, T). Where a group has no pair both are 0. `flip`: see `flipped`, else s is 1.
    """
    d = d.view(groups, -1, d.shape[1], 1)  # (P, G, T, 1)
    a = advantages.view(groups, -1, 1, advantages.shape[1])  # (P, G, 1, K)
    a = flipped(d, a) if flip else a
    gap = (a * d).sum(1, keepdim=True)  # d^w - s d^l, (P, 1, T, K)
    slopes = (b / 2 * torch.sigmoid(b / 2 * gap) * a).flatten(0, 1)
    return slopes, -gap[:, 0]


def flipped(d: Tensor, a: Tensor) -> Tensor:
    """(P, G, T, K): a (P, G, 1, K) with the loser's -1 turned to +1 where d (P, G, T, 1) of the winner is above 0."""
    behind = (a.clamp(min=0) * d).sum(1, keepdim=True) > 0  # (P, 1, T, K): the reference fits x^w better
    return torch.where(behind & (a < 0), -a, a)


def first_and_last(scores: Tensor, groups: Tensor, std: str = "none") -> Tensor:
    """(N, K): +1 for the first image of each pair, which is the set's, and -1 for the other, whatever the scores."""
    return torch.tensor([1.0, -1.0]).to(scores).repeat(len(scores) // 2)[:, None].expand_as(scores)


class DPO(Objective):
    """The reference is the pretrained model, the snapshot "old", which becomes theta every `follow` optimiser steps, or
    one of a ring of `ring` earlier states, taken as often, drawn anew for each epoch by `seed`; that one draws the
    images, too. `rival`: of each pair the first image is given, and the better one."""

    whole_groups = True
    selects = True

    def __init__(self, keys: DPOSection | None = None, *, rival: bool = False, seed: int = 0, **values: Any) -> None:
        keys = DPOSection.of(keys, values)
        noising = grouped_noising(keys)
        super().__init__(advantage_std="none", noising=noising)
        self.rule = replace(self.rule, estimate=first_and_last if rival else best_and_worst)
        self.b, self.follow, self.flip = keys.b, keys.follow, keys.flip
        self.ring = None if keys.ring is None or keys.follow is None else ReferenceHistory(keys.ring, keys.follow, seed)
        self.anchor = None if keys.follow is None else "old"
        self.snapshots = self.ring.names if self.ring else () if keys.follow is None else ("old",)
        self._refer()
        self.coupling = GroupLoss(self._slopes)

    @classmethod
    def of(cls, section: Section, given: BuildContext) -> DPO:
        """With whether pairs are a set's pictures with rivals, and the seed that chooses the reference."""
        image_set = given.config.image_set
        rival = image_set is not None and image_set.rival
        return cls(section, rival=rival, seed=given.config.seed)  # type: ignore[arg-type]

    def _refer(self) -> None:
        if self.ring is not None:
            self.anchor = self.samples_from = self.ring.chosen

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        # A pair of each group; the trained LoRA's error and the reference's, before the step.
        return Cost(share=2 / rollout.group_size, forwards=2)

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """Only what is in a pair: the other members are never forwarded."""
        return chosen_pairs(advantages, samples, self.rows_per_sample(rollout))

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        self.coupling.measure(self, policy, step, lambda rows: (excess_error(policy, rows, self.anchor),))

    def _slopes(self, measured: Tensor, advantages: Tensor, mine: Tensor) -> Tensor:
        d, a = measured[0].flatten(0, 1), advantages.flatten(0, 1)
        slopes, margin = pair_slopes(d, a, len(advantages), self.b, self.flip)
        paired = ((advantages[:, :, None] > 0).any(1) & mine[:, None, None]).expand_as(margin)
        self.means.add("dpo/loss", -logsigmoid(self.b / 2 * margin), paired)
        self.means.add("dpo/accuracy", margin > 0, paired)
        if self.flip:  # no slope is negative but a loser's
            self.means.add("dpo/flipped", ~(slopes < 0).unflatten(0, advantages.shape[:2]).any(1), paired)
        return slopes.unflatten(0, advantages.shape[:2])

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1): e_theta. The reference's part of d is a constant, and its value is in the slopes already."""
        return own_error(policy, rows)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """Twice the rows' share: the mean over a step's rows is then the mean over its pairs."""
        return 2 * self.coupling.loss(phi, rows)

    def after_step(self, policy: Policy, step: int) -> None:
        super().after_step(policy, step)
        if self.ring is not None:
            self.ring.after_step(policy, step)
        elif self.follow is not None and step % self.follow == 0:
            policy.ema_update("old", 0.0)

    def after_epoch(self, policy: Policy, step: int) -> None:
        super().after_epoch(policy, step)
        if self.ring is not None:
            self.ring.after_epoch(step)
            self._refer()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self.ring is None else {"reference": self.ring.chosen})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.ring is not None:
            self.ring.chosen = str(state["reference"])
            self._refer()
