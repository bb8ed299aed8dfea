"""What a config adds to a plain run beside its methods, each imported only where it is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffrl.config import Config
    from diffrl.run.build import Build


def check(config: Config) -> None:
    """Raise Problem for what an addition could not do."""
    if config.tracking.trackers:
        from diffrl.additions.trackers import check_trackers

        check_trackers(config)


def add(build: Build) -> None:
    """The order is that of the hooks."""
    if build.config.tracking.trackers:
        from diffrl.additions.trackers import add_trackers

        add_trackers(build)
