"""BranchGRPO (arXiv 2509.06040): a group is the leaves of one tree; every edge is a row, computed and trained once.

symbol        name here      meaning
split steps   splits         there every node gets `branch` children by independent noise
node value    values         mean of the scores of its leaves
advantage     advantages     (value - mean) / std over the nodes of one depth in one tree

The paper's script scales the split's noise by 4 and takes the log-probability without: the sampler is then not the
policy whose ratio is trained. Here the scale is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.denoising import SamplePlan
from diffrl.methods.shared.credit import advantages_per_step
from diffrl.methods.tree import TreeSection
from diffrl.methods.tree.plan import TreePlan
from diffrl.objectives.advantages import AdvantageRule, ScoredBatch
from diffrl.objectives.minibatches import sample_pairs
from diffrl.rollout import Rollout
from diffrl.samplers import SamplerSpec


class Branched:
    """The credit of trees."""

    selects = True

    def __init__(self, keys: TreeSection | None = None, *, group: int, steps: int, **values: Any) -> None:
        keys = TreeSection.of(keys, values)
        self.group, self.steps, self.tree = group, steps, TreePlan(keys.splits, keys.branch)

    @classmethod
    def of(cls, section: TreeSection, config: Config) -> Branched:
        return cls(section, group=config.rollout.group_size, steps=config.rollout.stochastic_steps)

    def share(self, group: int) -> float:
        """An edge is one row."""
        return sum(self.tree.nodes(step) for step in range(self.steps)) / (group * self.steps)

    def plan(self, spec: SamplerSpec) -> SamplePlan:
        return self.tree

    def rows_per_sample(self, rollout: Rollout) -> int:
        return self.steps

    def advantages(self, rule: AdvantageRule, scored: ScoredBatch) -> Tensor:
        """(N, T, columns): a leaf's row has its edge's advantage, also where another leaf trains the edge."""
        by_step: dict[int, Tensor] = {}
        for count in {self.tree.nodes(step) for step in range(self.steps)}:
            span = self.group // count
            values = scored.scores.view(-1, span, scored.scores.shape[1]).nanmean(1)[:, None]  # (P count, 1, K)
            nodes = ScoredBatch(values[:, 0], scored.weights, scored.groups[::span], scored.features, scored.auxiliary)
            by_step[count] = advantages_per_step(rule, nodes, values).repeat_interleave(span, 0)
        return torch.cat([by_step[self.tree.nodes(step)] for step in range(self.steps)], dim=1)

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """An edge belongs to the first of its leaves: so it is trained once, by whichever process has that leaf."""
        pairs = sample_pairs(samples, self.steps)
        sample, step = pairs.T
        span = torch.tensor([self.group // self.tree.nodes(i) for i in range(self.steps)])[step]
        return pairs[rollout.member[sample] % span == 0]
