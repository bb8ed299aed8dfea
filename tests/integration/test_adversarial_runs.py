"""Rewards that learn, in whole runs: resumed, and on two processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launching import launch
from PIL import Image
from test_resume import run_and_die

from diffrl.config import load_config
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.run.train import train


@pytest.fixture
def adversarial_config(config_file, tmp_path: Path):
    for name, color in (("a", "red"), ("b", "orange")):
        (tmp_path / "pool").mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), color).save(tmp_path / "pool" / f"{name}.png")
    reward = {"references": str(tmp_path / "pool"), "learning_rate": 1e-2, "steps": 2, "hidden": 16}

    def write(name: str, **sections: Any) -> Path:
        path = config_file(name, **sections)
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "rewards": {"adversarial": reward}}))
        return path

    return write


def learned(run_dir: str) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(Path(run_dir))
    assert path is not None
    return checkpoint.load(path)[0]["learning"]


def test_killed_and_resumed_it_ends_the_same(adversarial_config) -> None:
    whole, broken = (adversarial_config(name) for name in ("whole", "broken"))
    train(load_config(whole))
    assert run_and_die(broken, "diffrl.run.loop:Loop._step", 4) == -signal.SIGKILL
    config = load_config(broken)
    train(config, resume=Path(config.run_dir))
    one, two = (load_config(path).run_dir for path in (whole, broken))
    assert all(torch.equal(a, b) for a, b in zip(learned(one).values(), learned(two).values(), strict=True))
    lines = [
        [{k: v for k, v in line.items() if "seconds" not in k} for line in read_metrics(run)] for run in (one, two)
    ]
    assert lines[0] == lines[1]
    assert {"learning/adversarial/loss", "eval/adversarial_first"} <= {key for line in lines[0] for key in line}


@pytest.mark.long
def test_one_process_equals_two(adversarial_config) -> None:
    alone, shared = (adversarial_config(name, epochs=2) for name in ("alone", "shared"))
    train(load_config(alone))
    done = launch(2, shared)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (learned(load_config(path).run_dir) for path in (alone, shared))
    for name, tensor in one.items():
        if not name.split("/")[1].startswith("adam"):
            assert torch.allclose(two[name], tensor, atol=1e-4), name
    last = [read_metrics(load_config(path).run_dir)[-1] for path in (alone, shared)]
    for key in ("learning/adversarial/loss", "learning/adversarial/gap", "eval/adversarial", "eval/adversarial_first"):
        assert last[0][key] == pytest.approx(last[1][key], rel=1e-2, abs=1e-3), key
