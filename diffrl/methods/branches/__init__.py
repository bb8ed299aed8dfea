"""G2RPO and TempFlow-GRPO: single steps from shared ODE paths."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from diffrl.config.base import PAIR, Method, Problem, key
from diffrl.methods.shared.sections import CreditSection


class BranchesSection(CreditSection):
    method = Method(
        "branches",
        "branches",
        {"G2RPO": "2510.01982", "TempFlow-GRPO": "2508.04324"},
        about="single steps from one path",
        kind="credit",
        trainer="diffrl.methods.branches.credit:Branching",
        needs={"rollout": {"same_noise": True}},
    )
    seeds: int = key(1, "ODE paths of a group, over which its images divide (G2RPO 1, TempFlow 4)", "paths", ge=1)
    steps: Annotated[tuple[int, ...], PAIR] | None = key(
        None, "the stochastic steps, 0 is the noisiest; null: all but the last"
    )
    strides: Annotated[tuple[int, ...], PAIR] = key(
        (1,), "granularities: each image goes on over every so many-th step, once for each (G2RPO: [1, 2])"
    )
    scope: Literal["group", "seed"] = key(
        "group", "images that an advantage compares: of a step, or of its path's alone"
    )

    def trained(self, rollout: Any) -> tuple[int, ...]:
        """The stochastic steps."""
        return tuple(range(rollout.steps - 1)) if self.steps is None else self.steps

    def check(self, config: Any) -> None:
        self.check_common("branches", config)
        rollout, steps = config.rollout, self.trained(config.rollout)
        if not steps or list(steps) != sorted(set(steps)) or not 0 <= steps[0] <= steps[-1] < rollout.noisy_steps:
            text = f"{list(steps)}: expected rising numbers within 0 to {rollout.noisy_steps - 1} ({rollout.sampler})"
            raise Problem("branches.steps", text)
        if not self.strides or min(self.strides) < 1 or len(set(self.strides)) < len(self.strides):
            raise Problem("branches.strides", f"{list(self.strides)}: expected different numbers of at least 1")
        if rollout.group_size % self.seeds:
            text = f"{self.seeds} paths do not divide the {rollout.group_size} images of a group (rollout.group_size)"
            raise Problem("branches.seeds", text)
        if self.scope == "seed" and rollout.group_size == self.seeds:
            raise Problem("branches.scope", '"seed" compares the images of a path, but each has one (branches.seeds)')
        if rollout.window is not None:
            raise Problem(
                "rollout.window", f"{rollout.window}, but branches.steps says which steps are stochastic; null"
            )
        if rollout.same_noise != (self.seeds == 1):
            value = str(self.seeds == 1).lower()
            text = f"{str(rollout.same_noise).lower()}, but branches starts from {self.seeds} noises a group: {value}"
            raise Problem("rollout.same_noise", text)
