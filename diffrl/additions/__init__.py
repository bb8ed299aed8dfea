"""What judges a plain run, and what a config adds to it beside methods: the latter is imported only where it is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffrl.config import Config
    from diffrl.run.build import Build


def check(config: Config) -> None:
    """Raise Problem for what an addition could not do, and for given LoRAs that are not there."""
    if config.lora.start is not None or config.lora.merge:
        from diffrl.loras.given import check_given

        check_given(config)
    if config.tracking.trackers:
        from diffrl.additions.trackers import check_trackers

        check_trackers(config)


def add(build: Build) -> None:
    """What every run has, and what its config asks for. The order is that of the hooks."""
    from diffrl.additions.guard import GuardRails
    from diffrl.additions.suspicion import add_suspicions

    add_suspicions(build)
    build.add(GuardRails(build))
    if build.config.tracking.trackers:
        from diffrl.additions.trackers import Trackers

        build.add(Trackers(build.config.tracking.trackers, build.folder.path, build.config.resolved()))
