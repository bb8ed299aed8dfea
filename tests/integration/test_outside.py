"""An objective and an add-on of another package, each one file, are trained from the shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diffrl.cli.objectives import write_objective

ADD_ON = Path(__file__).parents[2] / "examples" / "methods" / "bounded.py"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages: one with the objective `mine` and the add-on `bounded`."""
    folder = tmp_path / "site"
    written, _ = write_objective("mine", tmp_path)
    folder.mkdir()
    shutil.copy(written, folder)
    shutil.copy(ADD_ON, folder)
    facts = folder / "outside-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[diffrl.methods]\nmine = mine:Mine\nbounded = bounded:Bounded\n")
    return folder


def diffrl(site: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diffrl", *map(str, words)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True)


@pytest.mark.long
def test_an_objective_and_an_add_on_from_outside_are_trained_from_the_shell(site: Path, config_file: Any) -> None:
    config = config_file("run", objective="mine", bounded={"most": 1.5}, epochs=1)
    run = config.parent / "run"
    done = diffrl(site, "train", config)
    assert done.returncode == 0, done.stderr
    largest = [json.loads(line).get("bounded/largest") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(value is not None and 0 < value <= 1 for value in largest)
    plain = diffrl(site, "train", config, "bounded=null", f"run_dir={config.parent / 'plain'}")
    assert plain.returncode == 0, plain.stderr
    ours, theirs = (load_file(next((config.parent / name).rglob("*.safetensors"))) for name in ("run", "plain"))
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)  # it acts
    wrong = diffrl(site, "train", config, "bounded.mist=1")
    assert wrong.returncode == 2 and 'bounded.mist: unknown key (nearest: "bounded.most")' in wrong.stderr
    away = subprocess.run([sys.executable, "-m", "diffrl", "train", str(config)], capture_output=True, text=True)
    assert away.returncode == 2 and "mine" in away.stderr and "Traceback" not in away.stderr
