"""Methods: an objective, a wrapper or credit over the steps is a folder; none imports another, but for `shared`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffrl.config import Config
    from diffrl.run.build import Build


def check(config: Config) -> None:
    """Raise Problem for what could not be added."""
    if config.evaluate.also:
        from diffrl.methods.student_checks import check_students

        check_students(config)


def add(build: Build) -> None:
    """What a config adds beside its methods, each imported only where it is on.

    The order is that of the hooks; a source is wrapped by those that come after it.
    """
    config, rewards = build.config, build.scorer.rewards.values()
    if any(getattr(reward, "corrects", False) for reward in rewards):
        from diffrl.methods.d2align.stage1 import add_norm

        add_norm(build)
    if config.rollout.scout is not None:
        from diffrl.methods.scout import add_scouting

        add_scouting(build)
    if config.tracking.groups or build.asked:
        from diffrl.methods.votes import add_votes

        add_votes(build)
    if config.image_set is not None:
        from diffrl.methods.image_set.source import add_image_set

        add_image_set(build)
    if build.scorer.observing:
        from diffrl.methods.learning import add_learning

        add_learning(build)
    if config.evaluate.also:
        from diffrl.methods.students import add_students

        add_students(build)
