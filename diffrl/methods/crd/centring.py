"""Centring inside prompt groups, for any micro-batches and processes (CRD, arXiv 2603.14128).

P prompts, G images of each (a group), N = P G images over all processes, n of them here, T rows per image, K rewards,
S sides of the centring: 1 (plain mean), or 2 (towards high and towards low rewards).

symbol       name here          meaning
q            q                  external reward in [0, 1]
mean_group   centring_weights   an average over the prompt group, plain or weighted by the reward
qc           Targets.qc         q less its group's mean
r_theta      r                  implicit reward of a row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffrl.objectives.objective import RunningMeans, Step


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


@dataclass(frozen=True)
class Targets:
    """What an epoch's advantages say, on the policy's device; by global sample (P, G, ...) or local one (n, ...)."""

    advantages: Tensor  # (n, K) that they were made of
    weights: Tensor  # (P, G, K, S); of other processes' groups only where groups are split over processes
    local_weights: Tensor  # (n, K, S)
    qc: Tensor  # (n, K, S)
    qc_groups: Tensor  # (P, G, K), for diagnostics
    known: Tensor  # (n, K) 1 where the reward applies, else 0: no loss
    split: bool  # are groups split over processes?
    group: int  # G

    @classmethod
    def of(cls, step: Step, q: Tensor, known: Tensor | None, tau: float | None, device: torch.device) -> Targets:
        """The targets of q (n, K) of the local samples; `known` (N, K): where a reward applies (None: everywhere)."""
        rollout, rewards = step.rollout, q.shape[1]
        prompts, count = len(rollout.prompts), len(rollout.member)
        here, group = slice(rollout.first, rollout.first + count), rollout.total // prompts
        split = count % group != 0
        table = torch.zeros(rollout.total, rewards)
        table[here] = q
        if split:  # zeros elsewhere: the sum over processes puts their slices together
            table = step.reduce(table.to(device)).cpu()
        known = torch.ones_like(table, dtype=torch.bool) if known is None else known
        q = table.view(prompts, group, rewards).double()
        weights = centring_weights(q, tau, known.view_as(q))
        qc = (q[..., None] - group_averages(q, weights)).float()
        weights = weights.float().to(device, non_blocking=True)
        return cls(
            advantages=step.advantages,
            weights=weights,
            local_weights=weights.flatten(0, 1)[here],
            qc=qc.flatten(0, 1)[here].to(device, non_blocking=True),
            qc_groups=qc[..., 0].to(device, non_blocking=True),
            known=known[here].float().to(device, non_blocking=True),
            split=split,
            group=group,
        )

    def whole(self, step: Step) -> bool:
        """Does every micro-batch hold whole groups? The same on every process, as they lie alike on all of them."""
        return not self.split and all(len(part) % self.group == 0 for part in step.parts)

    def means_of_step(self, r: Tensor, step: Step, means: RunningMeans) -> Tensor:
        """(P, T, K, S) group means of a step's r (N, T), 0 where other processes have it; logs what r looks like."""
        prompts, per_sample = len(step.rollout.prompts), r.shape[1]
        if self.split:
            r = step.reduce(r)
        r = r.view(prompts, self.group, per_sample)  # (P, G, T)
        found = group_averages(r.flatten(2)[..., None], self.weights[:, :, None])[:, 0]
        touched = step.rollout.prompt_index[torch.cat(list(step.parts))[:, 0]].unique()
        groups = (torch.arange(prompts) if self.split else touched).to(r.device, non_blocking=True)
        r, qc = r[groups].transpose(1, 2), self.qc_groups[groups]
        diagnose(r.flatten(0, 1), qc.repeat_interleave(per_sample, 0), means)
        return found

    def means_of_batch(self, r: Tensor, sample: Tensor, means: RunningMeans) -> Tensor:
        """(b, K, S) group means of a micro-batch's r (b,) of whole groups, whose members stand side by side."""
        qc = self.qc[sample]
        blocks = r.detach().view(-1, self.group, 1)
        weights = self.local_weights[sample].view(*blocks.shape[:2], *qc.shape[1:])
        diagnose(blocks[..., 0], qc[..., 0].view(*blocks.shape[:2], -1), means)
        return group_averages(blocks, weights).expand_as(weights).flatten(0, 1)


def diagnose(r: Tensor, q: Tensor, means: RunningMeans) -> None:
    """How far r_theta (groups, G) spreads inside groups, and its correlation with q (groups, G, K) there."""
    r = r - r.mean(1, keepdim=True)
    q = q - q.mean(1, keepdim=True)
    norms = r.square().sum(1, keepdim=True).sqrt()[..., None] * q.square().sum(1, keepdim=True).sqrt()
    means.add("crd/r_theta_std", r.square().mean(1).sqrt())
    means.add("crd/correlation", ((r[..., None] * q).sum(1, keepdim=True) / norms.clamp_min(1e-12)).flatten())
