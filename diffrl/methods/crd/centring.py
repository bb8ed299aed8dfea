"""Centring inside prompt groups, for any micro-batches and processes (CRD, arXiv 2603.14128).

P prompts, G images of each (a group), N = P G images over all processes, n of them here, T rows per image, K rewards.

symbol       name here          meaning
q            q                  external reward in [0, 1]
mean_group   centring_weights   the mean over those of the prompt group to which the reward applies
qc           Targets.qc         q less its group's mean
r_theta      r                  implicit reward of a row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffrl.objectives.objective import OptimiserStep, RunningMeans


def centring_weights(known: Tensor) -> Tensor:
    """The averages that centre a group, (P, G, K): 1 over the count of where the reward applies, by `known` (bool)."""
    members = known.double()
    return members / members.sum(1, keepdim=True).clamp_min(1.0)


def group_averages(values: Tensor, weights: Tensor) -> Tensor:
    """(P, 1, K) averages of values (P, G, K), or (P, G, 1) for all rewards, under weights (P, G, K)."""
    return (values * weights).sum(1, keepdim=True)


@dataclass(frozen=True)
class CenteredTargets:
    """What an epoch's advantages say, on the policy's device; by global sample (P, G, ...) or local one (n, ...)."""

    advantages: Tensor  # (n, K) that they were made of
    weights: Tensor  # (P, G, K); of other processes' groups only where groups are split over processes
    local_weights: Tensor  # (n, K)
    qc: Tensor  # (n, K)
    qc_groups: Tensor  # (P, G, K), for diagnostics
    known: Tensor  # (n, K) 1 where the reward applies, else 0: no loss
    split: bool  # are groups split over processes?
    group: int  # G

    @classmethod
    def of(cls, step: OptimiserStep, q: Tensor, known: Tensor | None, device: torch.device) -> CenteredTargets:
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
        weights = centring_weights(known.view_as(q))
        qc = (q - group_averages(q, weights)).float()
        weights = weights.float().to(device, non_blocking=True)
        return cls(
            advantages=step.advantages,
            weights=weights,
            local_weights=weights.flatten(0, 1)[here],
            qc=qc.flatten(0, 1)[here].to(device, non_blocking=True),
            qc_groups=qc.to(device, non_blocking=True),
            known=known[here].float().to(device, non_blocking=True),
            split=split,
            group=group,
        )

    def whole(self, step: OptimiserStep) -> bool:
        """Does every micro-batch hold whole groups? The same on every process, as they lie alike on all of them."""
        return not self.split and all(len(part) % self.group == 0 for part in step.parts)

    def means_of_step(self, r: Tensor, step: OptimiserStep, means: RunningMeans) -> Tensor:
        """(P, T, K) group means of a step's r (N, T), 0 where other processes have it; logs what r looks like."""
        prompts, per_sample = len(step.rollout.prompts), r.shape[1]
        if self.split:
            r = step.reduce(r)
        r = r.view(prompts, self.group, per_sample)  # (P, G, T)
        found = group_averages(r[..., None], self.weights[:, :, None])[:, 0]
        touched = step.rollout.prompt_index[torch.cat(list(step.parts))[:, 0]].unique()
        groups = (torch.arange(prompts) if self.split else touched).to(r.device, non_blocking=True)
        r, qc = r[groups].transpose(1, 2), self.qc_groups[groups]
        diagnose(r.flatten(0, 1), qc.repeat_interleave(per_sample, 0), means)
        return found

    def means_of_batch(self, r: Tensor, sample: Tensor, means: RunningMeans) -> Tensor:
        """(b, K) group means of a micro-batch's r (b,) of whole groups, whose members stand side by side."""
        qc = self.qc[sample]
        blocks = r.detach().view(-1, self.group, 1)
        weights = self.local_weights[sample].view(*blocks.shape[:2], *qc.shape[1:])
        diagnose(blocks[..., 0], qc.view(*blocks.shape[:2], -1), means)
        return group_averages(blocks, weights).expand_as(weights).flatten(0, 1)


def diagnose(r: Tensor, q: Tensor, means: RunningMeans) -> None:
    """How far r_theta (groups, G) spreads inside groups, and its correlation with q (groups, G, K) there."""
    r = r - r.mean(1, keepdim=True)
    q = q - q.mean(1, keepdim=True)
    norms = r.square().sum(1, keepdim=True).sqrt()[..., None] * q.square().sum(1, keepdim=True).sqrt()
    means.add("crd/r_theta_std", r.square().mean(1).sqrt())
    means.add("crd/correlation", ((r[..., None] * q).sum(1, keepdim=True) / norms.clamp_min(1e-12)).flatten())
