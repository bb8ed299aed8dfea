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
from children import in_child
from safetensors.torch import load_file

from diffrl.cli.main import main
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


def with_site(site: Path, said: Path, *words: str) -> None:
    """In a child: the command in a process that finds the packages of the folder too, stderr in a file."""
    sys.path.insert(0, str(site))
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    os._exit(main(list(words)))


@pytest.mark.long
def test_an_objective_and_an_add_on_from_outside_are_trained_from_the_shell(
    site: Path, config_file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file("run", objective="mine", bounded={"most": 1.5}, epochs=1)
    run = config.parent / "run"
    done = diffrl(site, "train", config)
    assert done.returncode == 0, done.stderr
    largest = [json.loads(line).get("bounded/largest") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(value is not None and 0 < value <= 1 for value in largest)
    said = config.parent / "said"
    plain = ["train", str(config), "bounded=null", f"run_dir={config.parent / 'plain'}"]
    assert in_child(with_site, site, said, *plain) == 0, said.read_text()
    ours, theirs = (load_file(next((config.parent / name).rglob("*.safetensors"))) for name in ("run", "plain"))
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)  # it acts
    assert in_child(with_site, site, said, "train", str(config), "bounded.mist=1") == 2
    assert 'bounded.mist: unknown key (nearest: "bounded.most")' in said.read_text()
    assert main(["train", str(config)]) == 2  # without the packages
    away = capsys.readouterr().err
    assert "mine" in away and "Traceback" not in away
