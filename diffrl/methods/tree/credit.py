"""BranchGRPO (arXiv 2509.06040): a group is the leaves of one tree; every edge is a row, computed and trained once.

symbol        name here      meaning
split steps   splits         there every node gets `branch` children by independent noise
node value    values         mean of the scores of its leaves
advantage     advantages     (value - mean) / std over the nodes of one depth in one tree

The paper's script scales the split's noise by 4 and takes the log-probability without: the sampler is then not the
policy whose ratio is trained. Here the scale is 1.

Pruning leaves rows out of the training, never out of the rollout. Depth: a window of `skip` steps that begins with the
last ones and moves towards noise by one every `skip_every` epochs, to the one before the last split, as in its code.
Width: of the edges behind the last split's own, "best" keeps the first half of each branch (the code sorts a branch's
edges by advantages that are all its leaf's, so the order decides), "both" those of a tree's best and worst quarter of
leaves (code: of all trees' together).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from diffrl.advantages import weighted_sum
from diffrl.config import Config
from diffrl.denoising import SamplePlan
from diffrl.methods.shared.credit import by_row
from diffrl.methods.tree import TreeSection
from diffrl.methods.tree.plan import Tree
from diffrl.objectives.advantages import AdvantageRule, Scored
from diffrl.objectives.minibatches import sample_pairs
from diffrl.rollout import Rollout
from diffrl.samplers import SamplerSpec

Keep = Literal["all", "best", "both"]


class Branched:
    """The credit of trees."""

    selects = True

    def __init__(self, keys: TreeSection | None = None, *, group: int, steps: int, **values: Any) -> None:
        keys = TreeSection.of(keys, values)
        self.group, self.steps, self.keep = group, steps, keys.keep
        self.skip, self.skip_every = keys.skip, keys.skip_every
        self.skip_last = max(keys.splits[-1] - 1, 0)
        self.tree = Tree(keys.splits, keys.branch)
        self._selected: Tensor | None = None  # (N,) bool of the epoch: leaves that width pruning keeps

    @classmethod
    def of(cls, section: TreeSection, config: Config) -> Branched:
        return cls(section, group=config.rollout.group_size, steps=config.rollout.stochastic_steps)

    def share(self, group: int) -> float:
        """An edge is one row; `trained_steps` leaves out steps, "both" half of the edges behind the last split."""
        edges = torch.tensor([float(self.tree.nodes(step)) for step in range(self.steps)])
        if self.keep == "both":
            edges[self.tree.splits[-1] + 1 :] /= 2
        return float(edges[self.trained_steps(0)].sum()) / (group * self.steps)

    def plan(self, spec: SamplerSpec) -> SamplePlan:
        return self.tree

    def rows_per_sample(self, rollout: Rollout) -> int:
        return self.steps

    def advantages(self, rule: AdvantageRule, scored: Scored) -> Tensor:
        """(N, T, columns): a leaf's row has its edge's advantage, also where another leaf trains the edge."""
        self._selected = self._leaves(scored)
        by_step: dict[int, Tensor] = {}
        for count in {self.tree.nodes(step) for step in range(self.steps)}:
            span = self.group // count
            values = scored.scores.view(-1, span, scored.scores.shape[1]).nanmean(1)[:, None]  # (P count, 1, K)
            nodes = Scored(values[:, 0], scored.weights, scored.groups[::span], scored.features, scored.auxiliary)
            by_step[count] = by_row(rule, nodes, values).repeat_interleave(span, 0)
        return torch.cat([by_step[self.tree.nodes(step)] for step in range(self.steps)], dim=1)

    def _leaves(self, scored: Scored) -> Tensor:
        if self.keep != "both":
            return torch.ones(len(scored.scores), dtype=torch.bool)
        total = weighted_sum(scored.scores, scored.weights)[:, 0].nan_to_num(-torch.inf).view(-1, self.group)
        place = total.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # 0 is the best
        quarter = max(self.group // 4, 1)
        return ((place < quarter) | (place >= self.group - quarter)).flatten()

    def trained_steps(self, epoch: int) -> Tensor:
        """(T,) bool: depth pruning, and "best"."""
        deepest = self.steps - self.skip
        first = max(deepest - epoch // self.skip_every, min(self.skip_last, deepest))
        step, behind = torch.arange(self.steps), self.tree.splits[-1] + 1
        trained = (step < first) | (step >= first + self.skip)
        return trained & (step < behind + max((self.steps - behind) // 2, 1)) if self.keep == "best" else trained

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """An edge belongs to the first of its leaves: so it is trained once, by whichever process has that leaf."""
        pairs = sample_pairs(samples, self.steps)
        sample, step = pairs.T
        span = torch.tensor([self.group // self.tree.nodes(i) for i in range(self.steps)])[step]
        chosen = (rollout.member[sample] % span == 0) & self.trained_steps(epoch)[step]
        if self._selected is not None:
            chosen &= (step <= self.tree.splits[-1]) | self._selected[rollout.first + sample]
        return pairs[chosen]
