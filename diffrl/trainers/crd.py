"""CRD: centered reward distillation (arXiv 2603.14128).

P prompts, G images of each (a group), N = P G images over all processes, n of them here, T rows per image, K rewards,
S sides of the centring: 1 (plain mean), or 2 (towards high and towards low rewards).

symbol           name here             meaning
v                target                true velocity of the noised image
v_theta, v_old   predictions           with the trained LoRA; with the slowly following snapshot "old"
r_theta          phi[:, 0]             implicit reward, error of v_old less error of v_theta
q                q                     external reward, clip(A) / (2 A_max) + 1/2
mean_group       centring_weights      an average over the prompt group, plain or weighted by the reward
qc               _Targets.qc           q less its group's mean
v_ref^cfg        reference_of          pretrained prediction with guidance
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from diffrl.advantages import Std, group_advantages, weighted_sum
from diffrl.forward import Prediction
from diffrl.policy import Policy
from diffrl.rollout import Rollout
from diffrl.trainers.algorithm import AdvantageRule, Decay, Rows, RunningMeans, Scored, Step
from diffrl.trainers.nft import Names, TimestepSampling, noise_levels, noised_rows, velocity_kl

LossKind = Literal["squared", "bce"]


def velocity_error(prediction: Tensor, target: Tensor, weighted: bool = True) -> Tensor:
    """(B,) `mean (v_. - v)^2 / w` over latent dimensions; w = stopgrad(mean |v_. - v|), at least 1e-5, or 1."""
    difference = prediction - target
    error = difference.square().flatten(1).mean(1)
    return error / difference.detach().abs().flatten(1).mean(1).clamp_min(1e-5) if weighted else error


def external_reward(advantages: Tensor, adv_clip: float) -> Tensor:
    """q in [0, 1] of advantages, any shape: `clip(A, +-A_max) / (2 A_max) + 1/2`."""
    return advantages.clamp(-adv_clip, adv_clip) / (2 * adv_clip) + 0.5


def centring_weights(q: Tensor, tau: float | None, known: Tensor | None = None) -> Tensor:
    """The averages that centre a group: (P, G, K, S) weights, each side sums to 1 over the group.

    Args:
        q: (P, G, K) external rewards in [0, 1].
        tau: None: S = 1, the plain mean. Above 0: S = 2, softmax(q / tau) and softmax(-q / tau). 0: S = 2, the plain
            means of the positive pool (q > 1/2, advantage above 0) and of the negative one; of all where one is empty.
        known: (P, G, K) bool, where the reward applies; elsewhere the weight is 0.
    """
    known = torch.ones_like(q, dtype=torch.bool) if known is None else known
    if tau is None:
        pools = [known]
    elif tau > 0:
        sides = [(sign * q / tau).masked_fill(~known, -torch.inf).softmax(1) for sign in (1, -1)]
        return torch.stack(sides, dim=-1).nan_to_num(0.0)  # NaN: a group in which nothing is known
    else:
        pools = [known & (q > 0.5), known & (q < 0.5)]
        pools = [torch.where(pool.any(1, keepdim=True), pool, known) for pool in pools]
    members = torch.stack(pools, dim=-1).to(q.dtype)
    return members / members.sum(1, keepdim=True).clamp_min(1.0)


def group_averages(values: Tensor, weights: Tensor) -> Tensor:
    """(P, 1, K, S) averages of values (P, G, K), or (P, G, 1) for all rewards, under weights (P, G, K, S)."""
    return (values[..., None] * weights).sum(1, keepdim=True)


def crd_loss(r: Tensor, r_mean: Tensor, qc: Tensor, adv_clip: float, b: float, kind: LossKind = "squared") -> Tensor:
    """(B, K) losses `A_max / b * (b rc - qc)^2`, mean over the sides of the centring.

    "bce": `A_max / b * BCE(logits = b rc, target = sigmoid(qc))`.

    Args:
        r: (B,) implicit rewards, differentiable.
        r_mean: (B, K, S) their groups' averages, constants; or what broadcasts to that.
        qc: (B, K, S) centred external rewards.
    """
    logits = b * (r[:, None, None] - r_mean)
    if kind == "bce":
        loss = binary_cross_entropy_with_logits(logits, qc.sigmoid(), reduction="none")
    else:
        loss = (logits - qc).square()
    return adv_clip / b * loss.mean(-1)


def anchor_strength(q: Tensor, beta: float, floor: float = 1e-4) -> Tensor:
    """Weight of the KL anchor by reward: `beta (c_min + q (1 - c_min))`, c_min = floor / beta, at most 1."""
    least = min(floor / beta, 1.0)
    return beta * (least + q * (1 - least))


@dataclass(frozen=True)
class _Targets:
    """What an epoch's advantages say, on the policy's device; by global sample (P, G, ...) or local one (n, ...)."""

    advantages: Tensor  # (n, K) that they were made of
    weights: Tensor  # (P, G, K, S); of other processes' groups only where groups are split over processes
    local_weights: Tensor  # (n, K, S)
    qc: Tensor  # (n, K, S)
    qc_groups: Tensor  # (P, G, K), for diagnostics
    known: Tensor  # (n, K) 1 where the reward applies, else 0: no loss
    strength: Tensor | None  # (n,) of the KL anchor, if it adapts
    split: bool  # are groups split over processes?
    group: int  # G


class CRD:
    """The objective of CRD on the loop's seams.

    A group's implicit rewards are centred with the mean over the whole group, whatever the micro-batches. Where these
    hold whole groups the mean comes from the differentiable pass itself. Otherwise a pass without gradient measures the
    step's implicit rewards first; it also keeps the error of "old" (one number a row), which then runs no second time.

    Old and anchor are forwards of their own, one after the other without gradient. One batch of mixed adapters for both
    (b rows of old, 2 b of the guided anchor) would do the same arithmetic: tried on the playground on a CPU, it takes
    0.96 of the time at 128 rows, 0.91 at 16. It would hold the activations of three times the rows, and bind together
    what is needed apart: the anchor for rows that GARDO gates, old before the step where micro-batches split groups.
    """

    name = "crd"
    samples_from = "sampling"
    snapshots: tuple[str, ...] = ("old", "sampling")
    reference: str | None = None
    keep_trajectory = False
    whole_groups = True

    def __init__(
        self,
        *,
        beta: float = 0.1,
        b: float = 1.0,
        adv_clip: float = 5.0,
        advantage_std: Std = "group",
        loss: LossKind = "squared",
        tau: float | None = None,
        weighted: bool = True,
        timesteps: int | None = None,
        timestep_sampling: TimestepSampling = "schedule",
        levels: int | None = None,
        same_noise: bool = True,
        anchor_guidance: float = 4.5,
        adaptive: bool = True,
        old: Decay | None = None,
        sampling: Decay | None = None,
    ) -> None:
        self.beta, self.b, self.adv_clip, self.kind, self.tau = beta, b, adv_clip, loss, tau
        self.weighted, self.timesteps, self.timestep_sampling = weighted, timesteps, timestep_sampling
        self.levels = levels
        self.same_noise, self.anchor_guidance, self.adaptive = same_noise, anchor_guidance, adaptive
        self.decays = {
            "old": old or Decay(value=0.25, slope=0.005, cap=0.999),
            "sampling": sampling or Decay(start=75, slope=0.0075, cap=0.999),
        }
        self.old_is_theta = True  # all LoRAs start equal; then r_theta is 0 and no second forward is needed
        self.rule = AdvantageRule(advantage_std)
        self._known: Tensor | None = None  # (N, K) of the epoch
        self._overall: Tensor | None = None  # (N,) advantage of the weighted sum of rewards
        self._targets: _Targets | None = None
        self._r_mean: Tensor | None = None  # (P, T, K, S) of the step, where micro-batches split groups
        self._old_error: Tensor | None = None  # (n, T), then too
        self._means = RunningMeans()

    def advantages(self, scored: Scored) -> Tensor:
        """What the rule says; remembers where rewards apply, and the advantage of the weighted sum for the anchor."""
        total = weighted_sum(scored.scores, scored.weights)
        self._overall = group_advantages(total, scored.groups, self.rule.std)[:, 0]
        self._known = self.rule.known(scored)
        return self.rule(scored)

    def rows_per_sample(self, rollout: Rollout) -> int:
        return self.timesteps or self.levels or len(rollout.schedule) - 1

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        """As DiffusionNFT's, but the members of a group share a row's noise level, and with `same_noise` its noise.

        Centring then removes what the shared noise does to all members alike: a step's gradient has 14 to 22 % less
        noise for its signal, and the same mean (scripts/crd_noise_variance.py). The published code draws it per image.
        """
        members: Names = [(*key, *rollout.identity(int(i))) for i in pairs[:, 0]]
        prompts: Names = [name[:-1] for name in members]
        count = self.rows_per_sample(rollout)
        t = noise_levels(rollout, prompts, pairs[:, 1], count, self.timestep_sampling, self.levels)
        return noised_rows(rollout, advantages, pairs, t, prompts if self.same_noise else members, self.old_is_theta)

    def before_step(self, policy: Policy, step: Step) -> None:
        """The epoch's targets, once; and the group means of r_theta, unless every micro-batch will hold its own.

        Every process takes the same branch: how groups lie in micro-batches and processes is the same on all of them.
        """
        if self._targets is None or self._targets.advantages is not step.advantages:
            self._targets = self._make_targets(step, policy.device)
        targets = self._targets
        self._r_mean = self._old_error = None
        whole = not targets.split and all(len(part) % targets.group == 0 for part in step.parts)
        if not self.old_is_theta and not whole:
            self._measure(policy, step, targets)

    def _make_targets(self, step: Step, device: torch.device) -> _Targets:
        rollout, rewards = step.rollout, step.advantages.shape[1]
        prompts, count = len(rollout.prompts), len(rollout.member)
        here, group = slice(rollout.first, rollout.first + count), rollout.total // prompts
        split = count % group != 0
        table = torch.zeros(rollout.total, rewards)
        table[here] = external_reward(step.advantages, self.adv_clip)
        if split:  # zeros elsewhere: the sum over processes puts their slices together
            table = step.reduce(table.to(device)).cpu()
        known = torch.ones_like(table, dtype=torch.bool) if self._known is None else self._known
        q = table.view(prompts, group, rewards).double()
        weights = centring_weights(q, self.tau, known.view_as(q))
        qc = (q[..., None] - group_averages(q, weights)).float()
        strength = None
        if self.adaptive and self.beta:
            assert self._overall is not None, "advantages() runs before before_step()"
            strength = anchor_strength(external_reward(self._overall[here], self.adv_clip), self.beta).to(device)
        weights = weights.float().to(device)
        return _Targets(
            advantages=step.advantages,
            weights=weights,
            local_weights=weights.flatten(0, 1)[here],
            qc=qc.flatten(0, 1)[here].to(device),
            qc_groups=qc[..., 0].to(device),
            known=known[here].float().to(device),
            strength=strength,
            split=split,
            group=group,
        )

    @torch.no_grad()
    def _measure(self, policy: Policy, step: Step, targets: _Targets) -> None:
        """r_theta of all rows of the step before its first backward pass, and its group means over all processes."""
        rollout, device = step.rollout, policy.device
        per_sample = self.rows_per_sample(rollout)
        r = torch.zeros(rollout.total, per_sample, device=device)
        self._old_error = torch.zeros(len(rollout.member), per_sample, device=device)
        for part in step.parts:
            rows = self.rows(rollout, step.advantages, part, step.key)
            sample, number = _pairs(rows)
            error, old_error = self._error(policy, rows, "default"), self._error(policy, rows, "old")
            self._old_error[sample, number] = old_error
            r[rollout.first + sample, number] = old_error - error
        if targets.split:
            r = step.reduce(r)
        r = r.view(len(rollout.prompts), targets.group, per_sample)  # (P, G, T)
        self._r_mean = group_averages(r.flatten(2)[..., None], targets.weights[:, :, None])[:, 0]
        touched = rollout.prompt_index[torch.cat(list(step.parts))[:, 0]].unique()
        groups = (torch.arange(len(r)) if targets.split else touched).to(device)
        r, qc = r[groups].transpose(1, 2), targets.qc_groups[groups]
        self._diagnose(r.flatten(0, 1), qc.repeat_interleave(per_sample, 0))

    def _error(self, policy: Policy, rows: Rows, name: str) -> Tensor:
        """(B,) error of a snapshot's velocity, without gradient."""
        with torch.no_grad(), policy.using(name):
            v = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v
        return velocity_error(v, _target(policy, rows), self.weighted)

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (B, 1): the implicit reward r_theta."""
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        error = velocity_error(rows.prediction.v, _target(policy, rows), self.weighted)
        if rows.on_policy:
            old_error = error.detach()
        elif self._old_error is not None:
            sample, number = _pairs(rows)
            old_error = self._old_error[sample, number]
        else:
            old_error = self._error(policy, rows, "old")
        return (old_error - error)[:, None]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        targets, (sample, number) = self._targets, _pairs(rows)
        assert targets is not None, "before_step() runs before loss()"
        r, qc = phi[:, 0], targets.qc[sample]
        if rows.on_policy:
            r_mean = torch.zeros_like(qc)  # r_theta is 0
        elif self._r_mean is not None:
            r_mean = self._r_mean[rows.groups.to(number.device), number]
        else:
            blocks = r.detach().view(-1, targets.group, 1)  # a group's members stand side by side
            weights = targets.local_weights[sample].view(*blocks.shape[:2], *qc.shape[1:])
            r_mean = group_averages(blocks, weights).expand_as(weights).flatten(0, 1)
            self._diagnose(blocks[..., 0], qc[..., 0].view(*blocks.shape[:2], -1))
        losses = crd_loss(r, r_mean, qc, self.adv_clip, self.b, self.kind)
        return (losses * targets.known[sample]).sum(0)

    def _diagnose(self, r: Tensor, q: Tensor) -> None:
        """How far r_theta (groups, G) spreads inside groups, and its correlation with q (groups, G, K) there."""
        r = r - r.mean(1, keepdim=True)
        q = q - q.mean(1, keepdim=True)
        norms = r.square().sum(1, keepdim=True).sqrt()[..., None] * q.square().sum(1, keepdim=True).sqrt()
        self._means.add("crd/r_theta_std", r.square().mean(1).sqrt())
        self._means.add("crd/correlation", ((r[..., None] * q).sum(1, keepdim=True) / norms.clamp_min(1e-12)).flatten())

    def penalty(self, policy: Policy, rows: Rows) -> Tensor | None:
        """`beta (c_min + q (1 - c_min)) mean (v_theta - v_ref^cfg)^2`.

        q is that of the weighted sum of the rewards, also where they are balanced one by one. Without `adaptive` the
        weight is beta.
        """
        if self.beta == 0:
            return None
        assert self._targets is not None, "before_step() runs before penalty()"
        kl = self.divergence(policy, rows, self.reference_of(policy, rows))
        self._means.add("kl", kl)
        strength = self._targets.strength
        return kl * (self.beta if strength is None else strength[_pairs(rows)[0]])

    def reference_of(self, policy: Policy, rows: Rows) -> Prediction:
        """The pretrained model's guided prediction; or, where a wrapper names a snapshot, that one's without guidance.

        A snapshot is a student, and students run without guidance: held to its guided prediction, each reset would
        ask for the guidance's step once more.
        """
        guidance = self.anchor_guidance if self.reference is None else rows.guidance
        with torch.no_grad(), policy.using(self.reference):
            return policy.predict(rows.x_t, rows.t, rows.cond, guidance)

    def divergence(self, policy: Policy, rows: Rows, reference: Prediction) -> Tensor:
        return velocity_kl(rows.prediction, reference)

    def after_step(self, policy: Policy, step: int) -> None:
        self.old_is_theta = False

    def after_epoch(self, policy: Policy, step: int) -> None:
        for name, schedule in self.decays.items():
            decay = schedule(step)
            policy.follow(name, decay)
            self._means.add(f"crd/{name}_decay", torch.tensor([decay], device=policy.device))
        self.old_is_theta = self.decays["old"](step) == 0.0

    def metrics(self) -> dict[str, Tensor]:
        return self._means.take()

    def state_dict(self) -> dict[str, Any]:
        return {"old_is_theta": self.old_is_theta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.old_is_theta = bool(state["old_is_theta"])


def _pairs(rows: Rows) -> tuple[Tensor, Tensor]:
    """Local sample and row number, each (b,)."""
    assert rows.pairs is not None, "noised_rows() sets the pairs"
    return rows.pairs[:, 0], rows.pairs[:, 1]


def _target(policy: Policy, rows: Rows) -> Tensor:
    """(b, C, h, w) the true velocity of the noised images."""
    assert rows.eps is not None, "noised_rows() sets the noise"
    return policy.process.velocity(rows.x0, rows.eps, rows.t)
