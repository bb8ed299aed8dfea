"""Every speed option against the plain path: the same first gradient (tests/speed_options.py is the table)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from covering import some
from speed_options import ELSEWHERE, METHODS, OPTIONS, assert_options_leave_the_gradient

from diffrl.config.sections import Engine


def test_the_table_is_whole() -> None:
    known = {name.removeprefix("engine.") for name in (*OPTIONS, *ELSEWHERE) if name.startswith("engine.")}
    assert known == set(Engine.model_fields)
    for place in ELSEWHERE.values():
        file, test = place.split("::")
        assert f"def {test}(" in (Path(__file__).parents[1] / file).read_text()


COMPILED = {"engine.compile"}  # its seconds are those of all others together, three times
CASES = [(method, compiled) for method in METHODS for compiled in (False, True)]


@pytest.mark.parametrize(("method", "compiled"), some(CASES, ("nft", False)))
def test_an_option_leaves_the_gradient(
    config_file: Any, monkeypatch: pytest.MonkeyPatch, method: str, compiled: bool
) -> None:
    assert_options_leave_the_gradient(config_file, monkeypatch, method, COMPILED if compiled else {*OPTIONS} - COMPILED)
