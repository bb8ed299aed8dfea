"""The config's sections of credit over the steps: DenseGRPO, G2RPO with TempFlow, BranchGRPO; present = on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from diffrl.config.base import PAIR, Method, Problem, Section, key


class CreditSection(Section):
    """What the three have in common: they say what GRPO's rollout draws beside, so only one can be."""

    def check_common(self, name: str, config: Any) -> None:
        others = [method.name for method in config.methods if method.kind == "credit" and method.name != name]
        if others:
            raise Problem(name, f"{others[0]} is on, too: both say what a rollout draws and scores; leave one out")
        if not config.method.takes_credit:
            text = f'gives every stochastic step its own credit, but objective "{config.method.name}" does not train on'
            raise Problem(name, f"{text} the steps; use grpo")
        if (timesteps := config.objective_section.timesteps) is not None:
            where = f"{config.method.name}.timesteps"
            raise Problem(where, f"{timesteps}, but {name} says which steps are trained; null")
        if config.rollout.tail is not None:
            raise Problem("rollout.tail", f"{config.rollout.tail:g}, but {name} says how images go on; leave it out")


class DenseSection(CreditSection):
    method = Method(
        "dense",
        "DenseGRPO",
        {"DenseGRPO": "2601.20218"},
        about="each step's own gain",
        kind="credit",
        trainer="diffrl.methods.dense.credit:Dense",
    )
    ode_steps: int | None = key(
        None, "steps of a continuation, at most; null: all that are left (1 was worse than Flow-GRPO)", "steps", ge=1
    )
    credit: Literal["gain", "level", "min"] = key(
        "gain",
        "gain: the score after a step less that before it; level: the score after it; min: the least gain from the "
        "step on (PURE), against hacking",
    )
    calibrate: int | None = key(
        None,
        "find the noise of every step first, in so many rounds of one epoch's prompts: more where as many images gain "
        "as lose; sampler dance; null: as rollout.noise_level and noise_levels say",
        "rounds",
        ge=1,
    )

    def arguments(self, config: Any) -> dict[str, Any]:
        """Without the calibration, which is the run's."""
        return {"common": config.rollout.same_noise, "ode_steps": self.ode_steps, "credit": self.credit}

    def check(self, config: Any) -> None:
        self.check_common("dense", config)
        if self.calibrate is not None and config.rollout.sampler != "dance":
            text = f'gives s = psi(t) itself, which is the sampler "dance", not "{config.rollout.sampler}"'
            raise Problem("dense.calibrate", text)
        if self.calibrate is not None and config.rollout.stochastic_steps < config.rollout.steps:
            raise Problem("dense.calibrate", "needs all steps stochastic, but rollout.window is shorter")


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

    def arguments(self, config: Any) -> dict[str, Any]:
        result = {"group": config.rollout.group_size, "steps": self.trained(config.rollout)}
        return super().arguments(config) | result

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
    skip: int = key(0, "depth pruning: so many steps are not trained; 0: none", "steps", ge=0)
    skip_every: int = key(
        30,
        "they begin with the last steps and move towards noise by one after so many epochs, to the one before the last "
        "split",
        "epochs",
        ge=1,
    )
    keep: Literal["all", "best", "both"] = key(
        "all",
        "width pruning behind the last split: best: the first half of each branch's steps is trained (its code); both: "
        "the best and the worst quarter of the leaves",
    )

    def arguments(self, config: Any) -> dict[str, Any]:
        rollout = config.rollout
        return super().arguments(config) | {"group": rollout.group_size, "steps": rollout.stochastic_steps}

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
        if self.skip >= steps:
            raise Problem("tree.skip", f"{self.skip} of {steps} stochastic steps leaves nothing to train")
