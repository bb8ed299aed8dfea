"""G2RPO (arXiv 2510.01982) and TempFlow-GRPO's branching (2508.04324): single steps from one ODE path, scored apart.

symbol     name here            meaning
m, B       seeds, G / seeds     ODE paths of a group, and its members on each
M          steps                the stochastic steps, one row of each member; the rest of its way is the ODE's
L          strides              granularities: the ODE goes on over every l-th level
A^{k,l}    by view              advantage among the images of step k and stride l
A^k        sum over l           of the row

G2RPO is (1 seed, the first half of the steps, strides 1 and 2 or 1 to 3), TempFlow (4 seeds, all steps but the last,
stride 1).
`scope` "seed" compares only the branches of one initial noise (TempFlow's later versions), "group" all of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.denoising import SamplePlan
from diffrl.methods.branches import BranchesSection
from diffrl.methods.branches.plan import BranchPlan
from diffrl.methods.shared.credit import advantages_per_step, view_scores
from diffrl.objectives.advantages import AdvantageRule, ScoredBatch
from diffrl.objectives.minibatches import sample_pairs
from diffrl.rollout import Rollout
from diffrl.samplers import SamplerSpec


class Branching:
    """The credit of single steps from shared paths."""

    selects = False

    def __init__(
        self, keys: BranchesSection | None = None, *, group: int, steps: tuple[int, ...], **values: Any
    ) -> None:
        keys = BranchesSection.of(keys, values)
        self.group, self.steps = group, steps
        self.seeds, self.strides, self.scope = keys.seeds, keys.strides, keys.scope

    @classmethod
    def of(cls, section: BranchesSection, config: Config) -> Branching:
        return cls(section, group=config.rollout.group_size, steps=section.trained(config.rollout))

    def share(self, group: int) -> float:
        return 1.0

    def plan(self, spec: SamplerSpec) -> SamplePlan:
        return BranchPlan(self.seeds, self.steps, self.strides)

    def rows_per_sample(self, rollout: Rollout) -> int:
        return len(self.steps)

    def advantages(self, rule: AdvantageRule, scored: ScoredBatch) -> Tensor:
        """Each view by itself, then the sum over the strides of its step."""
        groups = scored.groups
        if self.scope == "seed":
            member = torch.arange(len(groups)) % self.group
            groups = groups * self.seeds + member * self.seeds // self.group
        each = advantages_per_step(rule, scored, view_scores(scored), groups)
        return each.unflatten(1, (len(self.steps), len(self.strides))).sum(2)

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        return sample_pairs(samples, len(self.steps))
