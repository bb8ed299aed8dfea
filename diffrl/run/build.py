"""`Build`: the parts of a run while it is put together, and what the config adds to a plain one (`add_extras`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from diffrl.config import Config
from diffrl.objectives.objective import Objective
from diffrl.policy import Policy
from diffrl.rewards.compose import Composition
from diffrl.rewards.scoring import Scorer
from diffrl.run.evaluation import Evaluation
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import Monitor, RunHook
from diffrl.run.parts import named
from diffrl.run.processes import Processes
from diffrl.run.source import EpochSource, Rollouts


@dataclass
class Build:
    """What an extra reads, and where it puts its parts: around `source`, or behind the other `hooks`."""

    config: Config
    policy: Policy
    objective: Objective
    scorer: Scorer  # of training images
    compose: Composition
    weights: Tensor  # (K,) of the optimised rewards
    rollouts: Rollouts
    source: EpochSource
    processes: Processes
    monitor: Monitor
    folder: RunFolder
    evaluation: Evaluation
    lower: frozenset[str]  # rewards of which a lower score is better
    hooks: list[RunHook] = field(default_factory=list)

    @property
    def asked(self) -> list[str]:
        """The optimised rewards that people answer."""
        return [name for name in self.scorer.asking if name in self.config.rewards]

    def add(self, hook: RunHook) -> None:
        """A hook, which is the new source where it is one."""
        self.hooks.append(hook)
        if callable(hook):
            self.source = cast(EpochSource, hook)


# What a config may add to a run beside its methods, in the order in which hooks are called: is it on, and what adds it
# (`module:function` of a Build), which is not imported where it is off.
EXTRAS: Mapping[str, tuple[Callable[[Build], bool], str]] = {
    "suspicions": (lambda build: True, "diffrl.run.suspicion:add_suspicions"),
    "corrected": (
        lambda build: any(getattr(reward, "corrects", False) for reward in build.scorer.rewards.values()),
        "diffrl.methods.d2align.stage1:add_norm",
    ),
    "rollout.scout": (lambda build: build.config.rollout.scout is not None, "diffrl.methods.scout:add_scouting"),
    "votes": (lambda build: bool(build.config.tracking.groups or build.asked), "diffrl.methods.votes:add_votes"),
    "image_set": (lambda build: build.config.image_set is not None, "diffrl.methods.image_set.source:add_image_set"),
    "learning": (lambda build: bool(build.scorer.learning), "diffrl.methods.learning:add_learning"),
    "evaluate.also": (lambda build: bool(build.config.evaluate.also), "diffrl.methods.students:add_students"),
    "evaluate.divgen": (lambda build: bool(build.config.evaluate.divgen), "diffrl.divgen.in_training:add_divgen"),
    "report": (lambda build: True, "diffrl.report.hook:add_report"),
    "checkpoint.push": (lambda build: build.config.checkpoint.push is not None, "diffrl.run.pushing:add_push"),
}


def add_extras(build: Build) -> None:
    """Everything that the config adds, in the order of `EXTRAS`, and then what its methods do."""
    for is_on, place in EXTRAS.values():
        if is_on(build):
            named(place)(build)
    for section in build.config.sections:
        section.build(build)
