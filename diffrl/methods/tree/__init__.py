"""BranchGRPO: trees of images."""

from __future__ import annotations

from typing import Annotated, Any

from diffrl.config.base import PAIR, Method, Problem, key
from diffrl.methods.shared.sections import CreditSection


class TreeSection(CreditSection):
    method = Method(
        "tree",
        "BranchGRPO",
        {"BranchGRPO": "2509.06040"},
        about="a group is a tree",
        kind="credit",
        trainer="diffrl.methods.tree.credit:Branched",
        needs={"rollout": {"same_noise": True, "group_size": 16, "steps": 10}},
    )
    splits: Annotated[tuple[int, ...], PAIR] = key((0, 3, 6, 9), "steps at which every node gets children, rising")
    branch: int = key(2, "children of a node", ge=2)

    def check(self, config: Any) -> None:
        self.check_common("tree", config)
        rollout, steps = config.rollout, config.rollout.stochastic_steps
        splits = list(self.splits)
        if not splits or splits != sorted(set(splits)) or splits[0] < 0 or splits[-1] >= steps:
            raise Problem(
                "tree.splits", f"{splits}: expected rising numbers within 0 to {steps - 1}, the stochastic steps"
            )
        leaves = self.branch ** len(splits)
        if leaves != rollout.group_size:
            text = f"{rollout.group_size}, but a tree with {len(splits)} splits into {self.branch} has {leaves} leaves"
            raise Problem("rollout.group_size", text)
        if not rollout.same_noise:
            raise Problem("rollout.same_noise", "false, but a tree grows from one noise: true")
        if rollout.window_range is not None or rollout.window_move is not None:
            raise Problem("rollout.window_range", "a tree's stochastic steps begin with the first; leave it out")
