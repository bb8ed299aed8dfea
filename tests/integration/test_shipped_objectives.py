"""What `diffrl objectives check` asks of a stranger's objective, every shipped one keeps or refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import train_on

from diffrl.config.door import objectives
from diffrl.conformance.objective import CHECKS, check

LAUNCHED = "grpo"  # its two processes are launched as a user's check launches them; those of the others are forked


def _forked(file: Path) -> tuple[int, str, str]:
    return 0, train_on(2, file), ""


@pytest.mark.long
@pytest.mark.parametrize("objective", objectives())
def test_shipped_objectives_conform(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if objective != LAUNCHED:
        monkeypatch.setattr("diffrl.conformance.objective.train_on_two", _forked)
    seen = list(check(objective))
    assert len(seen) == len(CHECKS) and {name: text for name, holds, text in seen if not holds} == {}
