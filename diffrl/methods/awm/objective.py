"""AWM: advantage weighted matching (arXiv 2509.25050).

symbol       name here         meaning
e            own_error         mean over dims of (v_theta - v)^2 at a row's own t and eps
W(t, e)      phi[:, 0]         how much of it counts; -W takes the place of the clean image's log-likelihood
r            ratio             exp(W_old - W), both at the same t and eps; W_old of the epoch's start, from "old"
A            A                 advantage, clipped to +-adv_clip and divided by it
v_average    "average"         a snapshot that follows theta slowly: the brake where an epoch has many updates

    L = max(-r A, -clip(r, 1 -+ c) A) + beta mean (v_theta - v_ref)^2 + beta_average mean (v_theta - v_average)^2

    W      uniform   t     t2      huber                           ghuber, p = 1/4
           e         t e   t^2 e   t (sqrt(e + 1e-10) - 1e-5)      t / p ((e + 1e-10)^p - 1e-10^p)

On policy r is 1 and the gradient A dW/de grad e: "huber" is DiffusionNFT's up to a factor, for Gaussian residuals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.awm import AWMSection
from diffrl.methods.shared.coupling import error_under, own_error
from diffrl.methods.shared.sections import COPY, SLOW
from diffrl.objectives.noising import Noising
from diffrl.objectives.objective import Cost, Objective
from diffrl.objectives.penalty import Penalty
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy
from diffrl.rollout import Rollout

Weighting = Literal["uniform", "t", "t2", "huber", "ghuber"]
POWERS = {"huber": 0.5, "ghuber": 0.25}
TINY = 1e-10
ADV_CLIP = 5.0
CLIP = 1.0  # of the ratio; on policy it never acts


def matching_loss(e: Tensor, t: Tensor, weighting: Weighting) -> Tensor:
    """W (b,) of errors e (b,) at the noise levels t (b,)."""
    if weighting in POWERS:
        p = POWERS[weighting]
        scale = 1.0 if weighting == "huber" else 1 / p  # as published: huber is not divided by its power
        return scale * t * ((e + TINY) ** p - TINY**p)
    return {"uniform": torch.ones_like(t), "t": t, "t2": t * t}[weighting] * e


def awm_loss(loss: Tensor, old: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(b, K) losses of W (b,), W_old (b,) and A (b, K), and where the clip stops their gradient."""
    ratio = (old - loss).exp()[:, None]
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages
    return torch.maximum(plain, clipped), clipped > plain


@dataclass
class MatchedRows(Rows):
    old: Tensor | None = None  # (b,) W_old, left by `scalars`


class AWM(Objective):
    """Any sampler draws the images, with theta."""

    def __init__(self, keys: AWMSection | None = None, **values: Any) -> None:
        keys = AWMSection.of(keys, values)
        decays = {"old": COPY, "average": SLOW} if keys.beta_average else {"old": COPY}
        noising = Noising.of(keys)
        super().__init__(beta=keys.beta, advantage_std=keys.advantage_std, noising=noising, decays=decays)
        self.weighting, self.clip, self.adv_clip = keys.weighting, CLIP, ADV_CLIP
        if keys.beta_average:
            proximal = Penalty(self, keys.beta_average, name="awm/average_kl")
            proximal.reference = "average"
            self.penalties.append(proximal)

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        # Old, but for the epoch's first step; the average.
        return Cost(forwards=1 - 1 / steps + len(self.penalties) - 1, waiting=True)

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> MatchedRows:
        return MatchedRows(**vars(super().rows(rollout, advantages, pairs, key)))

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1): W; leaves W_old in the rows."""
        assert isinstance(rows, MatchedRows), "rows() makes them"
        e = own_error(policy, rows)[:, 0]
        loss = matching_loss(e, rows.t, self.weighting)
        old = loss if rows.on_policy else matching_loss(error_under(policy, rows, "old"), rows.t, self.weighting)
        rows.old = old.detach()
        self.means.add("awm/error", e)
        return loss[:, None]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        assert isinstance(rows, MatchedRows) and rows.old is not None, "scalars() runs before loss()"
        advantages = rows.advantages.clamp(-self.adv_clip, self.adv_clip) / self.adv_clip
        losses, stopped = awm_loss(phi[:, 0], rows.old, advantages, self.clip)
        self.means.add("awm/stopped", stopped.float().flatten())
        return losses.sum(0)
