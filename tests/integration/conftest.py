"""Whole runs: their reports have no lines in their charts, where a test does not ask for them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _blank(blank_charts: None) -> None:
    pass
