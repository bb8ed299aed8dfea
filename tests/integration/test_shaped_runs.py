"""Rewards of the whole batch and with columns, in whole runs: balanced, gated, resumed, and on two processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launching import train_on_two
from test_resume import run_and_die

from diffrl.config import load_config
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.run.train import train

JUDGE = """
import torch

class Judge:
    name = "judge"
    columns = ("light", "odd")

    def __call__(self, images, prompts, metadata):
        odd = torch.where(torch.tensor([len(p) % 2 == 1 for p in prompts]), images[:, 0].mean((1, 2)), torch.nan)
        return torch.stack([images.mean((1, 2, 3)), odd], 1)
"""


@pytest.fixture
def shaped(config_file: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "judge.py").write_text(JUDGE)
    judge = {"plugin": f"{tmp_path / 'judge.py'}:Judge"}

    def write(name: str, **sections: Any) -> Path:
        path = config_file(name, **sections)
        rewards = {"vendi": {"model": "playground"}, "light": {**judge, "column": "light"}}
        more = {"rewards": rewards, "watch": {"odd": {**judge, "column": "odd"}}}
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **more}))
        return path

    return write


def ending(path: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    run_dir = load_config(path).run_dir
    newest = checkpoint.latest(Path(run_dir))
    assert newest is not None
    lines = [{k: v for k, v in line.items() if "seconds" not in k} for line in read_metrics(run_dir)]
    return checkpoint.load(newest)[0]["lora"], lines


@pytest.mark.long
def test_balanced_and_gated_killed_and_resumed_it_ends_the_same(shaped: Callable[..., Path]) -> None:
    """MARBLE has a gradient for each column; GARDO compares them with a watched one."""
    more = {"marble": {"mode": "fresh"}, "gardo": {"auxiliary": ["odd"]}}
    whole, broken = (shaped(name, **more) for name in ("whole", "broken"))
    train(load_config(whole))
    assert run_and_die(broken, "diffrl.run.loop:Loop._step", 4) == -signal.SIGKILL
    config = load_config(broken)
    train(config, resume=Path(config.run_dir))
    (one, lines), (two, others) = ending(whole), ending(broken)
    assert all(torch.equal(one[name], two[name]) for name in one) and lines == others
    keys = {key for line in lines for key in line}
    assert {"reward/light", "watch/odd", "eval/odd", "batch/vendi", "eval/vendi_batch", "marble/alpha/vendi"} <= keys


@pytest.mark.long
def test_one_process_equals_two(shaped: Callable[..., Path]) -> None:
    alone, shared = (shaped(name, epochs=2, evaluate={"prompts": 1}) for name in ("alone", "shared"))
    train(load_config(alone))
    train_on_two(shared)  # one of them has no prompt to evaluate
    (one, lines), (two, others) = ending(alone), ending(shared)
    for name in one:
        assert torch.allclose(one[name], two[name], atol=1e-4), name
    for key in ("batch/vendi", "reward/vendi", "reward/vendi/std", "eval/vendi", "eval/vendi_batch", "eval/light"):
        assert lines[-1][key] == pytest.approx(others[-1][key], rel=1e-3, abs=1e-5), key
