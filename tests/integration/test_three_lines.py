"""The reward of three lines: trained from the shell, on two processes, and scored by a server of Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import train_on_two

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.records.tracking import read_metrics

THREE = """def redness(images, prompts):
    red, green, blue = images.unbind(dim=1)
    return (red - (green + blue) / 2).mean(dim=(1, 2))
"""
KEYS = ("reward/redness", "eval/redness", "loss")


@pytest.fixture
def config(config_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one epoch whose only reward is the function; the working folder holds its file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(THREE)
    path: Path = config_file("alone", epochs=1)
    values = {**yaml.safe_load(path.read_text()), "rewards": {"redness": {"plugin": "mine.py:redness"}}}
    path.write_text(yaml.safe_dump(values))
    return path


def figures(folder: Path) -> list[float]:
    return [row[key] for row in read_metrics(folder) for key in KEYS if key in row]


@pytest.mark.long
def test_it_trains_from_the_shell_on_two_processes(config: Path, tmp_path: Path) -> None:
    assert main(["train", str(config)]) == 0
    train_on_two(config, f"run_dir={tmp_path / 'two'}")
    alone = figures(Path(load_config(config).run_dir))
    assert len(alone) >= 4 and figures(tmp_path / "two") == pytest.approx(alone, rel=1e-4, abs=1e-6)


@pytest.mark.long
def test_it_trains_through_ray(config: Path, tmp_path: Path) -> None:
    """`diffrl rewards serve CONFIG --engine ray` in a process of its own, two replicas."""
    pytest.importorskip("ray.serve", reason="needs the extra ray")
    command = [sys.executable, "-m", "diffrl", "rewards", "serve", str(config), "--engine", "ray", "--port", "0"]
    command += ["--replicas", "2", "--cpus", "0.5"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split(" on ")[1].split()[0]
        assert main(["train", str(config)]) == 0
        values = yaml.safe_load(config.read_text())
        entry = {"plugin": "remote", "reward": "redness", "servers": url}
        far = tmp_path / "far.yaml"
        far.write_text(yaml.safe_dump({**values, "rewards": {"redness": entry}, "run_dir": str(tmp_path / "far")}))
        assert main(["train", str(far)]) == 0
    finally:
        os.kill(server.pid, signal.SIGINT)
        server.wait(60)
    assert figures(tmp_path / "far") == pytest.approx(figures(Path(load_config(config).run_dir)), rel=1e-6)
