"""Blank charts: few tests of whole runs look at one, and matplotlib takes twice as long for a report as a small run.

Everything of a report but the lines themselves is as ever. A test that looks at charts asks for the fixture `charts`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

BLANK = '<svg viewBox="0 0 1 1"></svg>'


def _draw(*given: Any, **more: Any) -> str:
    """In the place of `diffrl.report.plots.draw`."""
    return BLANK


def are_blank() -> bool:
    """Whether this process draws none."""
    plots = sys.modules.get("diffrl.report.plots")
    return plots is not None and plots.draw is _draw


def leave_blank() -> None:
    """In this process, from now on."""
    from diffrl.report import plots

    plots.draw = _draw


@pytest.fixture
def charts() -> None:
    """For tests that look at charts: they are drawn."""


@pytest.fixture
def blank_charts(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a folder of tests: no chart is drawn, neither here nor in children, but for tests that ask for `charts`."""
    from diffrl.report import plots

    drawn = plots.draw
    if "charts" not in request.fixturenames:
        leave_blank()
    yield
    plots.draw = drawn
