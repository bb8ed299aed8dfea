"""Hours made short: the trials of this folder at the size of some minutes (`make test-stress`).

`mutations.py` is the one that is not run here: it tries the tests themselves, for hours, and needs its own extra.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(name: str, out: Path, *words: str) -> dict[str, Any]:
    """What the trial wrote; it fails where the trial found something."""
    command = [sys.executable, str(HERE / f"{name}.py"), *words, "--out", str(out)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=HERE.parents[1], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kills", ["--kills", "3", "--epochs", "12", "--writers", "2", "--warm"]),
        ("folders", ["--folders", "30"]),
        ("fuzz", ["--mutations", "300", "--dry-runs", "5"]),
        ("nasty", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_trial_finds_nothing(name: str, words: list[str], tmp_path: Path) -> None:
    run(name, tmp_path / "found.json", *words)


@pytest.mark.slow
def test_a_reward_server_survives_kills_and_bad_requests(tmp_path: Path) -> None:
    found = run("serving", tmp_path / "found.json", "--images", "300", "--clients", "4", "--bad", "500")
    assert found["same scores"]["largest difference"] <= 1e-6
    assert found["restart"]["images with exactly one score, the right one"] == 300 and not found["restart"]["failures"]
    assert found["bad requests"]["answered with another status than expected"] == {}
    assert found["bad requests"]["and then a good one"]


@pytest.mark.slow
@pytest.mark.skipif(not any(map(which, ("chromium", "chromium-browser", "google-chrome"))), reason="no Chromium")
def test_votes_through_a_browser_are_kept_and_trained_on(tmp_path: Path) -> None:
    found = run("voting", tmp_path / "found.json", "--epochs", "4")
    assert found["votes"] == found["votes trained on"] == 24 and found["killed"] == {"page": 1, "run": 1}
