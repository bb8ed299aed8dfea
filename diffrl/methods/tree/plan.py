"""What a rollout of trees draws: every edge once, however many leaves share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from diffrl.denoising import Chain, SampledBatch, SampleJob, Trajectory
from diffrl.samplers import gaussian_log_prob, ode_step
from diffrl.sampling import SamplerSpec

if TYPE_CHECKING:
    from diffrl.policy import Conditioning


@dataclass(frozen=True)
class TreePlan:
    """A group is the leaves of one tree: at each of the steps `splits` a node gets `branch` children (BranchGRPO)."""

    splits: tuple[int, ...]
    branch: int = 2

    apart: ClassVar[bool] = False

    def views(self, spec: SamplerSpec) -> int:
        return 1

    def forwards(self, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int) -> int:
        """A step is taken by the nodes that the step before led to: one for all its children."""
        taken = [1, *(self.nodes(min(step, spec.stochastic_steps - 1)) for step in range(spec.steps - 1))]
        return sum(len({(prompt, member * nodes // group) for prompt, member in members}) for nodes in taken)

    def final(self, spec: SamplerSpec) -> int:
        return 0

    def nodes(self, step: int) -> int:
        """How many edges of a tree take step `step`."""
        return self.branch ** sum(split <= step for split in self.splits)

    def allocate(self, job: SampleJob, latents: Tensor) -> Trajectory:
        return Chain().allocate(job, latents)

    def draw(self, job: SampleJob, texts: Sequence[str], members: Sequence[int], cond: Conditioning) -> SampledBatch:
        roots, steps = sorted(set(texts), key=list(texts).index), job.spec.stochastic_steps
        leaves = [(roots.index(text), member) for text, member in zip(texts, members, strict=True)]
        own = cond.select(torch.tensor([list(texts).index(root) for root in roots]))
        first = [(roots[root], member) for root, member in edge_leaders(self, leaves, job.group, steps)]
        x = job.begin(roots, [0] * len(roots), same=True)
        return tree(job, self, x, own, leaves, job.group, job.step_noise(first, steps))


def tree(
    job: SampleJob,
    plan: TreePlan,
    x: Tensor,
    cond: Conditioning,
    leaves: Sequence[tuple[int, int]],
    group: int,
    noise: Tensor,
) -> SampledBatch:
    """The leaves of trees, all steps stochastic: every edge is one forward, however many leaves share it.

    x (A, C, h, w): the roots' noise, cond (A rows): theirs. leaves: (root, member) of image i, member in 0 .. G - 1 of
    G = `group`. noise (B', w, ...): of the members that lead an edge of these leaves, see `edge_leaders`; edge
    (root, node) draws that of its first member, so member 0's path is what it would be alone.
    """
    spec, width = job.spec, job.spec.stochastic_steps
    edges = [(root, 0) for root in range(len(x))]  # (root, node number) of the states in x
    index = {name: i for i, name in enumerate(edge_leaders(plan, leaves, group, width))}
    root_cond, kept = cond, [x.new_empty(0)] * (width + 1)
    log_prob = x.new_empty(len(leaves), width)
    for i in range(spec.steps):
        span = group // plan.nodes(i)
        t, t_next = job.ends(x, i)
        mine = root_cond.select(torch.tensor([root for root, _ in edges]))
        prediction = job.predict(x, t, mine, spec.guidance_scale)
        if i >= width:  # cps, renoise and ddim end without noise
            x, _ = ode_step(spec.sampler, x, prediction, t, t_next, None, job.policy.process)
            continue
        mean, std = job.kernel(x, prediction, i)
        before = {name: k for k, name in enumerate(edges)}
        children = sorted({(root, member // span) for root, member in leaves})
        wide = group // plan.nodes(i - 1) if i else group
        parent = _on(x, [before[root, node * span // wide] for root, node in children])
        lead = _on(x, [index[root, node * span] for root, node in children])
        mean, std, x = mean[parent], std[parent], x[parent]
        x_next = mean + std * noise[lead, i]
        place = {name: k for k, name in enumerate(children)}
        of_leaf = _on(x, [place[root, member // span] for root, member in leaves])
        kept[i], kept[i + 1] = x[of_leaf], x_next[of_leaf]
        log_prob[:, i] = gaussian_log_prob(x_next, mean, std)[of_leaf]
        x, edges = x_next, children
    place = {name: k for k, name in enumerate(edges)}
    span = group // plan.nodes(spec.steps)
    of_leaf = _on(x, [place[root, member // span] for root, member in leaves])
    return SampledBatch(x[of_leaf], None, torch.stack(kept, 1) if job.keep else None, log_prob)


def _on(x: Tensor, places: list[int]) -> Tensor:
    """Where x is, without a wait: torch.tensor(..., device=...) would be one."""
    return torch.tensor(places).to(x.device, non_blocking=True)


def edge_leaders(plan: TreePlan, leaves: Sequence[tuple[int, int]], group: int, width: int) -> list[tuple[int, int]]:
    """(root, member) of the first members of all edges that lead to these leaves, in order."""
    spans = {group // plan.nodes(i) for i in range(width)}
    return sorted({(root, member // span * span) for root, member in leaves for span in spans})
