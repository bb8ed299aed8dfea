"""Objectives that select rows have one gradient, sharded or not: what only keeps step counts as nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from children import child, ended
from launching import FSDP2, free_port
from sharded_gradients import gradients_of, train_together

from diffrl.policy import Policy

REDNESS = str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"
EMBEDDER = str(Path(__file__).parents[1] / "data" / "embedder.py") + ":Embedder"
# Three groups of four: over two processes the second one is split, and the selected rows are unevenly many.
SHARED: dict[str, Any] = {
    "epochs": 1,
    "optimise": {"batch_size": 12, "micro_batch": 0.3333, "learning_rate": 1e-12},
    "rollout": {"groups": 3, "group_size": 4, "batch_size": 4},
}
STEPS = {"sampler": "flow_sde", "steps": 4}
TREE = {"objective": "grpo", "grpo": {"beta": 0.1}, "rollout": {**STEPS, "same_noise": True}}
GATED = {"auxiliary": ["aux"], "gate": "all", "diversity": "off", "beta": 0.5, "reset": {"kl": None, "steps": None}}
BEST: dict[str, Any] = {"objective": "rwr", "rwr": {"weights": "best"}}
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": "dpo"},
    "sft": BEST,
    "sft-beta": {**BEST, "rwr": {"weights": "best", "beta": 0.1}},
    "sft-gardo": {
        **BEST,
        "gardo": GATED,
        "watch": {"aux": {"plugin": REDNESS, "power": 3.0}},
    },
    # The gate takes some images only, so some micro-batches have no penalised row, and sharded passes are everybody's.
    "marble-gardo": {
        "rewards": {"redness": {"plugin": REDNESS}, "power": {"plugin": REDNESS, "power": 2.0}},
        "marble": {"mode": "fresh"},
        "gardo": {**GATED, "gate": "batch", "auxiliary": ["aux"], "share": 0.2},
        "watch": {"aux": {"plugin": REDNESS, "power": 3.0}},
        "optimise": {"micro_batch": 0.1111},
    },
    "rwr-beta": {"objective": "rwr", "rwr": {"beta": 0.1}},
    "gdro": {"objective": "gdro"},
    "awm": {"objective": "awm", "awm": {"beta": 0.1}},
    "dgpo": {"objective": "dgpo", "dgpo": {"beta": 0.1, "clip": 1e-3}},
    "prdp": {"objective": "prdp", "rollout": STEPS},
    "fdfo": {  # the mean of the group that is split needs both processes
        "objective": "fdfo",
        "rollout": {"sampler": "cps", "steps": 4, "noise_level": 0.1, "same_noise": True},
        "optimise": {"inner_epochs": 2},
    },
    "dppo": {  # the second pass is off policy: old means by a snapshot, and some rows masked
        "objective": "grpo",
        "grpo": {"delta": 1e-3, "beta": 0.1},
        "rollout": STEPS,
        "optimise": {"inner_epochs": 2},
    },
    "srpo": {
        "objective": "direct",
        "rewards": {"redness": {"plugin": EMBEDDER}},
        "direct": {"align": {}, "pair": {}, "cap": 0.3, "beta": 0.1},
    },
    "tree": {**TREE, "tree": {"splits": [0, 2], "branch": 2}},
    # The second of three groups has a teacher of its own, and is split over two processes.
    "opd": {
        "objective": "opd",
        "prompts": {"train": {"ocr/train": 1, "geneval/train": 2}},
        "opd": {
            "teachers": {
                "a": {"prompts": ["ocr/train"]},
                "b": {"prompts": ["geneval/train"], "guidance": 3.0},
                "c": {"prompts": [], "everywhere": 0.1, "guidance": 2.0},
            }
        },
    },
    # One image of four is selected: the other process has no row at all.
    "alone": {**BEST, "rwr": {"weights": "best", "beta": 0.1}, "rollout": {"groups": 1}, "optimise": {"batch_size": 4}},
}
SAME = ("loss", "kl", "rwr/error", "dpo/loss", "dpo/accuracy", "gdro", "prdp", "ratio", "fdfo", "opd")


def written(config_file: Any, name: str) -> Path:
    sections = {**CASES[name]}
    for key, shared in SHARED.items():
        sections[key] = {**shared, **sections.get(key, {})} if isinstance(shared, dict) else shared
    path: Path = config_file(name, **sections)
    return path


def same(name: str, found: Any, expected: Any) -> None:
    gradients, line = found
    assert len(gradients) == len(expected[0]) > 0
    for ours, theirs in zip(gradients, expected[0], strict=True):
        assert theirs.norm() > 0, name
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-4, name
    for key in [key for key in expected[1] if key.startswith(("gardo/kl", *SAME))]:
        truth = expected[1][key]
        assert line[key] == (truth if truth is None else pytest.approx(truth, rel=1e-4, abs=1e-7)), (name, key)


@pytest.mark.parametrize("name", ["sft-beta", "tree"])
def test_a_sharded_process_trains_the_selected_rows(config_file: Any, monkeypatch: Any, name: str) -> None:
    path = written(config_file, name)
    expected = gradients_of(path)
    monkeypatch.setattr(Policy, "sharded", True)
    same(name, gradients_of(path), expected)


@pytest.mark.long
def test_gradients_of_two_processes_are_those_of_one(config_file: Any, tmp_path: Path) -> None:
    """Of two that are sharded by FSDP2, and of two that are whole."""
    paths = {name: written(config_file, name) for name in CASES}
    expected = {name: gradients_of(path) for name, path in paths.items()}
    for kind, environment in {"fsdp2": FSDP2, "whole": {}}.items():
        out, port, texts = tmp_path / f"{kind}.pt", free_port(), [str(path) for path in paths.values()]
        said = [tmp_path / f"{kind}{rank}" for rank in range(2)]
        codes = ended(child(train_together, rank, port, said[rank], out, texts, environment) for rank in range(2))
        assert codes == [0, 0], [file.read_text()[-3000:] for file in said]
        two = torch.load(out, weights_only=True)
        for name, path in paths.items():
            assert two[str(path)][1]["sharded"] == (kind == "fsdp2")
            same(name, two[str(path)], expected[name])
