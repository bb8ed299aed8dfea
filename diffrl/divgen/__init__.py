"""Diversity: measured in every run, and DivGenBench."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffrl.run.build import Build


def add(build: Build) -> None:
    """`evaluate.divgen`."""
    if build.config.evaluate.divgen:
        from diffrl.divgen.in_training import SmallDivGen

        build.add(SmallDivGen(build.evaluation))
