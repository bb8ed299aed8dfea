"""SRPO as a run: with MARBLE and GARDO, killed and resumed, and with a pair that leaves nothing to learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diffrl.config import load_config
from diffrl.run.train import Run, train

DATA = Path(__file__).parents[1] / "data"
EMBEDDER = f"{DATA}/embedder.py:Embedder"
SRPO: dict[str, Any] = {
    "objective": "direct",
    "direct": {"align": {}, "pair": {}, "cap": 0.4},
    "rewards": {"redness": {"plugin": EMBEDDER}},
    "tracking": {"samples": 0},
}


def lora_of(run: Run) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in run.policy.state("default").items()}


@pytest.mark.parametrize("mode", ["fresh", "full"])
def test_marble_balances_the_pairs_of_several_rewards(config_file: Any, mode: str) -> None:
    two = {"redness": {"plugin": EMBEDDER}, "other": {"plugin": EMBEDDER, "seed": 3}}
    run = Run(load_config(config_file(mode, **{**SRPO, "rewards": two, "marble": {"mode": mode}})))
    line = run.loop.run_epoch(0)
    assert math.isfinite(line["marble/cos_min"]) and min(line[f"marble/norm/{name}"] for name in two) > 0
    assert 0 <= line["direct/silenced"] <= 1
    run.close()


def test_gardo_holds_the_rows_of_its_images(config_file: Any) -> None:
    gardo = {"auxiliary": ["gold"], "gate": "all", "diversity": "off", "beta": 0.5}
    watch = {"gold": {"plugin": f"{DATA}/redness.py:Redness"}}
    run = Run(load_config(config_file("gardo", **{**SRPO, "gardo": gardo, "watch": watch})))
    lines = [run.loop.run_epoch(epoch) for epoch in range(2)]
    assert lines[1]["gardo/kl_gated"] > 0 and lines[1]["loss"] is not None
    run.close()


@pytest.mark.long
def test_a_resumed_run_ends_where_an_undisturbed_one_does(config_file: Any) -> None:
    """Levels, words and the noise that images were drawn from come from keys alone."""
    ends = []
    for name, stops in (("whole", []), ("halves", [1])):
        path = config_file(name, **SRPO)
        for number, epochs in enumerate([*stops, 2]):
            config = load_config(path, [f"epochs={epochs}"])
            train(config, resume=Path(config.run_dir) if number else None)
        ends.append(torch.cat([v.flatten() for v in lora_tensors(Path(config.run_dir))]))
    assert torch.equal(*ends)


def lora_tensors(folder: Path) -> list[torch.Tensor]:
    from diffrl.records import checkpoint

    saved = checkpoint.latest(folder)
    assert saved is not None
    tensors = checkpoint.load(saved)[0]["lora"]
    return [tensors[key] for key in sorted(tensors)]


def test_a_hinge_below_every_reward_leaves_the_weights(config_file: Any) -> None:
    silent = {"direct": {"align": {}, "pair": {}, "cap": -9.0}, "optimise": {"weight_decay": 0.0}}
    run = Run(load_config(config_file("silent", **{**SRPO, **silent})))
    before = lora_of(run)
    line = run.loop.run_epoch(0)
    assert line["grad_norm"] == 0.0 and line["direct/silenced"] == 1.0
    assert all(torch.equal(before[key], value) for key, value in lora_of(run).items())
    run.close()
