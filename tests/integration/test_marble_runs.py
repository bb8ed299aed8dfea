"""MARBLE in whole runs: every objective and mode, splits that must not matter, resume, and who is trained on what."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from launching import train_on_two
from test_equivalence import lora_of, same_lora
from test_resume import final_tensors, run_and_die

from diffrl.config import load_config
from diffrl.records.tracking import read_metrics
from diffrl.run.build import build_gradients
from diffrl.run.train import Run, train

COLOUR = """
class Colour:
    name = "colour"
    differentiable = True

    def __init__(self, channel: int, word: str = "") -> None:
        self.channel, self.word = channel, word

    def __call__(self, images, prompts, metadata):
        return images[:, self.channel].mean(dim=(1, 2)) - images.mean(dim=(1, 2, 3))

    def applies(self, prompt, metadata):
        return not self.word or self.word in prompt.split()
"""
GRPO = {"objective": "grpo", "rollout": {"sampler": "flow_sde"}, "grpo": {"beta": 0.04, "clip": 0.2}}
GARDO = {"gardo": {"auxiliary": ["jpeg"], "advantage_std": "none"}, "watch": {"jpeg": {}}}
CRD = {"objective": "crd", "rollout": {"groups": 4}, "crd": {"anchor_guidance": 1.5}}


@pytest.fixture
def write(config_file, tmp_path: Path):
    """Configs with three rewards, one of which applies to the prompts of a second file only."""
    plugin = tmp_path / "colour.py"
    plugin.write_text(COLOUR)
    for name, texts in (("red", ["red a", "red b", "red c on d", "red f"]), ("blue", ["blue a", "blue b", "blue c"])):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
    sources = {str(tmp_path / "red.txt"): 0.5, str(tmp_path / "blue.txt"): 0.5}
    rewards: dict[str, Any] = {"redness": None, "green": {"channel": 1}, "blue": {"channel": 2, "word": "blue"}}
    for name in ("green", "blue"):
        rewards[name]["plugin"] = f"{plugin}:Colour"
    redness = {"redness": {"plugin": str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"}}

    def config(name: str, mode: str = "fresh", **sections: Any) -> Path:
        marble = {"mode": mode, "every": 2, **sections.pop("marble", {})}
        prompts = {"train": sources, "test": sources}
        return config_file(name, prompts=prompts, rewards=rewards | redness, marble=marble, **sections)

    return config


def test_every_batch_carries_every_reward(write) -> None:
    """Two optimiser steps of two prompts' images each: both have signal for the reward of half of the prompts."""
    run = Run(load_config(write("shares", epochs=1)))
    for epoch in range(3):
        metrics = run.loop.run_epoch(epoch)
        steps = json.loads(metrics["marble/steps"])
        assert len(steps) == 2 and all(None not in step["norm"] for step in steps)
    run.close()


def test_coefficients_of_rewards_on_scales_of_their_own(write, caplog: pytest.LogCaptureFixture) -> None:
    path, nft, gardo = write("run", "amortised", **GARDO), "nft.advantage_std=none", "gardo.advantage_std="
    for overrides, warned in (
        ([], ["gardo.advantage_std"]),
        ([nft, gardo + "null"], ["nft.advantage_std"]),
        ([nft, gardo + "batch"], []),
        (["marble.mode=fresh"], []),
    ):
        caplog.clear()
        build_gradients(load_config(path, overrides))
        assert re.findall(r'(\S+) is "none"', caplog.text) == warned


@pytest.mark.parametrize(
    "sections", [{}, *(pytest.param(one, marks=pytest.mark.long) for one in (GRPO, CRD))], ids=["nft", "grpo", "crd"]
)
def test_a_run_logs_its_balance_whatever_the_objective(write, charts: None, sections: dict) -> None:
    config = load_config(write("run", epochs=2, tracking={"samples": 0}, **sections))
    train(config)
    for line in read_metrics(config.run_dir)[1:]:
        shares = [line[f"marble/alpha/{name}"] for name in config.rewards]
        assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0
        for key in ("cos_min", "cos_mean", "cos_var", "conflict", "norm/redness", "norm/green", "norm/blue"):
            assert math.isfinite(line[f"marble/{key}"])
    assert "Balance of the rewards" in (Path(config.run_dir) / "report.html").read_text()


def loras(path: Path, overrides: list[str], epochs: int = 2) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The LoRA after some epochs without evaluations and files, and the last line of metrics."""
    run = Run(load_config(path, overrides))
    metrics = [run.loop.run_epoch(epoch) for epoch in range(epochs)]
    run.close()
    return run.policy.state("default"), metrics[-1]


@pytest.mark.parametrize("mode", ["full", "amortised", "uniform", "advantages", "sum"])
def test_every_mode_trains(write, mode: str) -> None:
    lora, metrics = loras(write("run", mode), [])
    assert math.isfinite(metrics["marble/cos_mean"])
    assert ("marble/alpha/green" in metrics) == (mode not in ("sum", "advantages"))
    assert all(value.abs().sum() > 0 for key, value in lora.items() if "lora_B" in key)


def test_direct_alignment_is_balanced_by_its_rewards_own_gradients(write) -> None:
    """phi has a column for each reward there, so that K passes are the way."""
    _, metrics = loras(write("run", objective="direct"), ["rewards.redness=null"], epochs=1)
    assert metrics["marble/cos_min"] is not None and metrics["marble/norm/blue"] > 0


def test_a_measured_weighted_sum_takes_the_steps_of_a_plain_run(write) -> None:
    path = write("run", "sum")
    # Short steps: an element of A whose gradient is all rounding may go either way, by one of them.
    short = "optimise.learning_rate=1e-4"
    (measured, _), (plain, metrics) = (loras(path, [short, *more]) for more in ([], ["marble=null"]))
    assert same_lora(measured, plain) and "marble/cos_min" not in metrics


@pytest.mark.parametrize("sections", some([{}, CRD], {}), ids=["nft", "crd"])
def test_accumulation_does_not_matter(write, sections: dict) -> None:
    """To 5e-4 of the whole: the combination cancels gradients, and Adam amplifies the rounding that is left."""
    path = write("run", optimise={"batch_size": 8, "learning_rate": 1e-3}, **sections)
    one, eight = (loras(path, [f"optimise.micro_batch={size}"])[0] for size in ("null", 0.125))
    assert same_lora(eight, one, whole=5e-4)


@pytest.mark.long
def test_one_process_equals_two(write) -> None:
    """GARDO's gate included: one process may have penalised rows where the other has none."""
    gardo = {"auxiliary": ["aux"], "reset": {"kl": None, "steps": None}, "share": 0.1, "beta": 0.5}
    aux = {"plugin": str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness", "power": 3.0}
    # Short steps, as above: two processes round sums in another order.
    sections = {
        "epochs": 2,
        "gardo": gardo,
        "watch": {"aux": aux},
        "optimise": {"batch_size": 8, "learning_rate": 1e-4},
    }
    alone, shared = (write(name, **sections) for name in ("alone", "shared"))
    train(load_config(alone))
    train_on_two(shared)
    one, two = (load_config(path).run_dir for path in (alone, shared))
    assert same_lora(lora_of(two), lora_of(one))
    for a, b in zip(read_metrics(one), read_metrics(two), strict=True):
        for key in a:
            if key.startswith("marble/") and key != "marble/steps":
                # Cosines of small gradients: Adam's first steps divide the sums' rounding by themselves.
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-3), key


@pytest.mark.parametrize("mode", ["fresh", pytest.param("amortised", marks=pytest.mark.long)])
def test_resume_is_exact(write, mode: str) -> None:
    sections = {"epochs": 4, "marble": {"every": 3}, "tracking": {"samples": 0}, "evaluate": {"every": 10}}
    whole, broken = (write(name, mode, **sections) for name in ("whole", "broken"))
    train(load_config(whole))
    assert run_and_die(broken, "diffrl.run.loop:Loop._step", 6) == -signal.SIGKILL
    config = load_config(broken)
    train(config, resume=Path(config.run_dir))
    expected, ours = (final_tensors(Path(load_config(path).run_dir)) for path in (whole, broken))
    for part, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(ours[part][name], tensor), f"{part}/{name} differs after a resume"
    lines = [read_metrics(load_config(path).run_dir) for path in (whole, broken)]
    assert [line.get("marble/steps") for line in lines[0]] == [line.get("marble/steps") for line in lines[1]]


@pytest.mark.parametrize("precision", some(["bf16", "fp16"], "bf16"))
def test_half_precision_and_checkpointing(write, precision: str) -> None:
    optimise = {"precision": precision, "gradient_checkpointing": True, "batch_size": 8, "micro_batch": 0.5}
    run = Run(load_config(write("half", epochs=1, optimise=optimise)))
    if precision == "fp16":
        run.loop.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for epoch in range(2):
        metrics = run.loop.run_epoch(epoch)
    assert math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["marble/cos_min"])
    assert {p.dtype for _, p in run.policy.trainable} == {torch.float32}
    norms = [metrics[f"marble/norm/{name}"] for name in ("redness", "green", "blue")]
    assert max(norms) < 100, "norms are those of the unscaled gradients"
    run.close()
