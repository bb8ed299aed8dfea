"""Every reward against its original's own code, where `make upstream` has installed it (see `compare.py`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def compare() -> Any:
    """`compare.py`, which is a command and no package."""
    spec = importlib.util.spec_from_file_location("upstream_compare", HERE / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


COMPARE = compare()


@pytest.mark.long
@pytest.mark.parametrize("name", COMPARE.CASES)
def test_the_scores_are_the_originals(name: str) -> None:
    """Up to the resizing of bytes; on pictures of the model's own size up to float sums."""
    try:
        COMPARE.places(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    row = COMPARE.compare(name)
    assert row["spread"] > 0.0 and row["pairs"] == 30
    assert row["largest"] <= COMPARE.CASES[name].within * row["spread"], row
    assert row["largest_unresized"] <= 1e-5 * row["spread"], row
