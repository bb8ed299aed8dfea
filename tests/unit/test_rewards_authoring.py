"""`diffrl rewards new` writes a plugin that passes its own test and is found once it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.reward_tools.authoring import write_plugin


@pytest.mark.long
def test_the_new_plugin_passes_its_test_and_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rewards", "new", "edge_contrast", "--out", "plugin"]) == 0
    assert "pip install -e plugin" in capsys.readouterr().out
    files = {file.name for file in (tmp_path / "plugin").iterdir()}
    assert files == {"edge_contrast_reward.py", "test_edge_contrast_reward.py", "pyproject.toml"}
    quiet = {"cwd": tmp_path, "check": True, "capture_output": True, "text": True}
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", "site"]
    subprocess.run([*install, "./plugin"], **quiet)  # type: ignore[call-overload]
    script = """
import sys, pytest
from diffrl.rewards import load_reward
reward = load_reward("edge_contrast", gain=2.0)
from diffrl.reward_tools.cards import cards
assert cards()["edge_contrast"].measures.startswith("contrast of the picture")
print(type(reward).__name__, reward.card.range, type(reward).__module__)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "plugin"]))
"""
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, **quiet)  # type: ignore[call-overload]
    assert done.stdout.startswith("EdgeContrast (0.0, 1.0) edge_contrast_reward\n") and "2 passed" in done.stdout


def test_names_and_folders_that_are_taken(tmp_path: Path) -> None:
    for name, said in (
        ("Redness", "use lower-case letters"),
        ("a-b", "use lower-case letters"),
        ("clip", 'there is a reward "clip" \\(diffrl_zoo.clip:Clip\\)'),
    ):
        with pytest.raises(UserError, match=said):
            write_plugin(name, tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="exists already; choose another --out"):
        write_plugin("fresh", tmp_path / "full")
    assert not (tmp_path / "new").exists()
