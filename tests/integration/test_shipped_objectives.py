"""What `diffrl objectives check` asks of a stranger's objective, every shipped one keeps or refuses in one line."""

from __future__ import annotations

import pytest

from diffrl.config.door import objectives
from diffrl.conformance.objective import CHECKS, check


@pytest.mark.long
@pytest.mark.parametrize("objective", objectives())
def test_shipped_objectives_conform(objective: str) -> None:
    seen = list(check(objective))
    assert len(seen) == len(CHECKS) and {name: text for name, holds, text in seen if not holds} == {}
