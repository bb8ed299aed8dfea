"""Every speed option on the pretend device, against the plain path there (tests/speed_options.py is the table)."""

from __future__ import annotations

from typing import Any

import pytest
from speed_options import METHODS, assert_options_leave_the_gradient


@pytest.mark.parametrize("method", METHODS)
def test_an_option_leaves_the_gradient(config_file: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    assert_options_leave_the_gradient(config_file, monkeypatch, method)
