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

from typing import Literal

import torch
from torch import Tensor

from diffrl.denoising import SamplePlan
from diffrl.methods.branches.plan import Branches
from diffrl.methods.shared.credit import by_row, views_of
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.objective import AdvantageRule, Scored
from diffrl.rollout import Rollout
from diffrl.samplers import SamplerSpec


class Branching:
    """The credit of single steps from shared paths."""

    selects = False

    def __init__(
        self,
        *,
        group: int,
        steps: tuple[int, ...],
        seeds: int,
        strides: tuple[int, ...],
        scope: Literal["group", "seed"],
    ) -> None:
        self.group, self.steps, self.seeds, self.strides, self.scope = group, steps, seeds, strides, scope

    def share(self, group: int) -> float:
        return 1.0

    def plan(self, spec: SamplerSpec) -> SamplePlan:
        return Branches(self.seeds, self.steps, self.strides)

    def rows_per_sample(self, rollout: Rollout) -> int:
        return len(self.steps)

    def advantages(self, rule: AdvantageRule, scored: Scored) -> Tensor:
        """Each view by itself, then the sum over the strides of its step."""
        groups = scored.groups
        if self.scope == "seed":
            member = torch.arange(len(groups)) % self.group
            groups = groups * self.seeds + member * self.seeds // self.group
        each = by_row(rule, scored, views_of(scored), groups)
        return each.unflatten(1, (len(self.steps), len(self.strides))).sum(2)

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        return sample_pairs(samples, len(self.steps))
