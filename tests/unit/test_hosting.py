"""What the hosting service and citation tools read."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_it_is_yaml() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(files) > 5 and all(isinstance(yaml.safe_load(file.read_text()), dict) for file in files)
