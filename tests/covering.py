"""Which cases of a parametrized test `make test` runs; `make test-long` has the others, in CI on every change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(every: Iterable[Any], *covering: Any) -> list[Any]:
    """The cases of `every`, tuples being several arguments; those that are not `covering` are long."""
    cases = [(one, one if isinstance(one, tuple) else (one,)) for one in every]
    return [pytest.param(*own, marks=[] if one in covering else [pytest.mark.long]) for one, own in cases]
