"""A run on the hub or in an object store: sent while it trains (`checkpoint.push`), fetched to go on elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffrl.run.build import Build


def add(build: Build) -> None:
    if build.config.checkpoint.push is not None:
        from diffrl.pushing.hook import Push

        build.add(Push(build.config, build.folder, build.monitor))
