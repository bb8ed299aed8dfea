"""CRD: centered reward distillation (arXiv 2603.14128).

B rows of a micro-batch, N images over all processes, n of them here, K rewards.

symbol           name here             meaning
v                rows.velocity         true velocity of the noised image
v_theta, v_old   predictions           with the trained LoRA; with the slowly following snapshot "old"
r_theta          phi[:, 0]             implicit reward, error of v_old less error of v_theta
q                q                     external reward, clip(A) / (2 A_max) + 1/2
qc               Targets.qc            q less its group's mean (see centring.py)
v_ref^cfg        penalty.anchor        pretrained prediction with guidance
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffrl.advantages import group_advantages, weighted_sum
from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.crd import CRDSection
from diffrl.methods.crd.centring import CenteredTargets
from diffrl.methods.shared.coupling import velocity_error
from diffrl.methods.shared.sections import SCHEDULES
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.noising import Noising
from diffrl.objectives.objective import Cost, Objective, OptimiserStep
from diffrl.objectives.penalty import Penalty
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy

ADV_CLIP = 5.0  # A_max
SAMPLING = SCHEDULES["late"]  # how the snapshot that draws the images follows


def external_reward(advantages: Tensor, adv_clip: float) -> Tensor:
    """q in [0, 1] of advantages, any shape: `clip(A, +-A_max) / (2 A_max) + 1/2`."""
    return advantages.clamp(-adv_clip, adv_clip) / (2 * adv_clip) + 0.5


def crd_loss(r: Tensor, r_mean: Tensor, qc: Tensor, adv_clip: float, b: float) -> Tensor:
    """(B, K) losses `A_max / b * (b rc - qc)^2`.

    r (B,): implicit rewards, differentiable; r_mean (B, K): their groups' averages, constants; qc (B, K): of q.
    """
    return adv_clip / b * (b * (r[:, None] - r_mean) - qc).square()


def anchor_strength(q: Tensor, low: float, high: float) -> Tensor:
    """Weight of the KL anchor by reward: `beta (c_min + q (1 - c_min))` of beta = high, c_min = low / high."""
    least = low / high
    return high * (least + q * (1 - least))


class CRD(Objective):
    """The objective of CRD.

    A group's implicit rewards are centred with the mean over the whole group, whatever the micro-batches. Where these
    split groups, a pass without gradient measures the step's implicit rewards first, and keeps the errors of "old".

    A group's rows share their noise level, and with `same_noise` their noise: centring removes what that does to all
    alike: 14 to 22 % less noise in a step's gradient on the playground. The published code draws it per image. Old and
    anchor are forwards of their own: one batch of mixed adapters needs the activations of three times the rows.
    """

    samples_from = "sampling"
    whole_groups = True

    def __init__(self, keys: CRDSection | None = None, **values: Any) -> None:
        keys = CRDSection.of(keys, values)
        noising = Noising.of(keys, group_level=True, group_noise=keys.same_noise)
        decays = {"old": keys.old, "sampling": SAMPLING}
        beta = keys.beta[1] if isinstance(keys.beta, tuple) else keys.beta
        self.least = keys.beta[0] if isinstance(keys.beta, tuple) else None
        super().__init__(beta=beta, advantage_std=keys.advantage_std, noising=noising, decays=decays)
        self.penalties = [Anchor(self, beta, keys.anchor_guidance)]
        self.b, self.adv_clip = keys.b, ADV_CLIP
        self.strength: Tensor | None = None  # (n,) of the KL anchor, if it adapts
        self._overall: Tensor | None = None  # (N,) q of the weighted sum of rewards
        self._targets: CenteredTargets | None = None
        self._r_mean: Tensor | None = None  # (P, T, K) of the step, where micro-batches split groups
        self._old_error: Tensor | None = None  # (n, T), then too

    def advantages(self, scored: ScoredBatch) -> Tensor:
        """What the rule says; remembers q of the weighted sum for the anchor."""
        total = group_advantages(weighted_sum(scored.scores, scored.weights), scored.groups, self.rule.std)
        self._overall = external_reward(total[:, 0], self.adv_clip)
        return self.rule(scored)

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        # Old; and the trained LoRA's own, for means of split groups, both of which are measured before the step.
        return Cost(forwards=2 if split else 1, waiting=not split)

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        """The epoch's targets, once; and the group means of r_theta, unless every micro-batch will hold its own."""
        if self._targets is None or self._targets.advantages is not step.advantages:
            q = external_reward(step.advantages, self.adv_clip)
            self._targets = CenteredTargets.of(step, q, self.known, policy.device)
            if self.least is not None and (high := self.penalties[0].beta):
                assert self._overall is not None, "advantages() runs before before_step()"
                q = self._overall[step.rollout.first : step.rollout.first + len(step.advantages)]
                self.strength = anchor_strength(q, min(self.least, high), high).to(policy.device, non_blocking=True)
        self._r_mean = self._old_error = None
        if not self.on_policy and not self._targets.whole(step):
            self._measure(policy, step, self._targets)

    @torch.no_grad()
    def _measure(self, policy: Policy, step: OptimiserStep, targets: CenteredTargets) -> None:
        """r_theta of all rows of the step before its first backward pass, and its group means over all processes."""
        rollout, per_sample = step.rollout, self.rows_per_sample(step.rollout)
        r = torch.zeros(rollout.total, per_sample, device=policy.device)
        self._old_error = torch.zeros(len(rollout.member), per_sample, device=policy.device)
        for part in step.parts:
            rows = self.rows(rollout, step.advantages, part, step.key)
            sample, number = rows.places()
            error, old_error = self._error(policy, rows, "default"), self._error(policy, rows, "old")
            self._old_error[sample, number] = old_error
            r[rollout.first + sample, number] = old_error - error
        self._r_mean = targets.means_of_step(r, step, self.means)

    def _error(self, policy: Policy, rows: Rows, name: str) -> Tensor:
        """(B,) error of a snapshot's velocity, without gradient."""
        with torch.no_grad(), policy.adapter(name):
            v = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v
        return velocity_error(v, rows.velocity(policy.process))

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (B, 1): the implicit reward r_theta."""
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        error = velocity_error(rows.prediction.v, rows.velocity(policy.process))
        if rows.on_policy:
            old_error = error.detach()
        elif self._old_error is not None:
            sample, number = rows.places()
            old_error = self._old_error[sample, number]
        else:
            old_error = self._error(policy, rows, "old")
        return (old_error - error)[:, None]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        targets, (sample, number) = self._targets, rows.places()
        assert targets is not None, "before_step() runs before loss()"
        r, qc = phi[:, 0], targets.qc[sample]
        if rows.on_policy:
            r_mean = torch.zeros_like(qc)  # r_theta is 0
        elif self._r_mean is not None:
            r_mean = self._r_mean[rows.groups.to(number.device, non_blocking=True), number]
        else:
            r_mean = targets.means_of_batch(r, sample, self.means)
        losses = crd_loss(r, r_mean, qc, self.adv_clip, self.b)
        return (losses * targets.known[sample]).sum(0)

    def after_epoch(self, policy: Policy, step: int) -> None:
        super().after_epoch(policy, step)
        for name, decay in self.decays.items():
            self.means.add(f"crd/{name}_decay", torch.tensor([decay(step)], device=policy.device))


class Anchor(Penalty):
    """`beta (c_min + q (1 - c_min)) mean (v_theta - v_ref^cfg)^2`; where `crd.beta` is a number, the weight is that.

    q is that of the weighted sum of the rewards, also where they are balanced one by one.
    """

    objective: CRD

    def strength(self, rows: Rows) -> float | Tensor:
        strength = self.objective.strength
        return self.beta if strength is None else strength[rows.places()[0]]
