"""Rewards that learn, in whole runs: resumed, and on two processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from covering import some
from launching import train_on_two
from PIL import Image
from test_resume import run_and_die

from diffrl.config import load_config
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.resources import shipped
from diffrl.run.train import train

LONG = pytest.mark.long
FOLDER = str(shipped("assets", "playground", "preference"))  # of the toy, by its name: the tiny model is another one
REWARDS = {
    "adversarial": {"model": "playground", "learning_rate": 1e-2, "steps": 2, "hidden": 16},
    "adversarial_preference": {"reward": "preference", "model": FOLDER, "learning_rate": 1e-4, "steps": 2, "layers": 1},
    "reform": {"reward": "preference", "model": FOLDER, "preferences": "playground", "learning_rate": 1e-2, "steps": 2},
}


@pytest.fixture
def learning_config(config_file, tmp_path: Path):
    noise = np.random.default_rng(0)  # references that the model's own images beat
    for name in "ab":
        (tmp_path / "pool").mkdir(exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / "pool" / f"{name}.png")

    def write(name: str, reward: str, **sections: Any) -> Path:
        rewards = {reward: {**REWARDS[reward], "references": str(tmp_path / "pool")}}
        path = config_file(name, **sections)
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "rewards": rewards}))
        return path

    return write


def learned(run_dir: str) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(Path(run_dir))
    assert path is not None
    return checkpoint.load(path)[0]["learning"]


@pytest.mark.parametrize(
    "reward",
    some(["adversarial", "adversarial_preference", "reform"]),
)
def test_killed_and_resumed_it_ends_the_same(learning_config, reward: str) -> None:
    whole, broken = (learning_config(name, reward) for name in ("whole", "broken"))
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
    assert {f"learning/{reward}/loss", f"eval/{reward}_first"} <= {key for line in lines[0] for key in line}
    assert any(line.get(f"learning/{reward}/steps", 1) > 0 for line in lines[0])


@pytest.mark.long
@pytest.mark.parametrize("reward", REWARDS)
def test_one_process_equals_two(learning_config, reward: str) -> None:
    alone, shared = (learning_config(name, reward, epochs=2) for name in ("alone", "shared"))
    train(load_config(alone))
    train_on_two(shared)
    one, two = (learned(load_config(path).run_dir) for path in (alone, shared))
    for name, tensor in one.items():
        # Attention does not depend on its keys' bias: its gradient is rounding, which Adam makes a whole step.
        if not name.split("/")[1].startswith("adam") and not name.endswith("in_proj_bias"):
            assert torch.allclose(two[name], tensor, atol=1e-4), name
    last = [read_metrics(load_config(path).run_dir)[-1] for path in (alone, shared)]
    for key in (f"learning/{reward}/loss", f"learning/{reward}/gap", f"eval/{reward}", f"eval/{reward}_first"):
        assert last[0][key] == pytest.approx(last[1][key], rel=1e-2, abs=1e-3), key
