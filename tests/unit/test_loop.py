"""The loop's economy and its bookkeeping, on a tiny random pipeline of the true classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import count_forwards

from diffrl.config import load_config
from diffrl.errors import TrainingError
from diffrl.policy.base import Policy
from diffrl.run.train import Run


def make(config_file: Any, overrides: list[str], **sections: Any) -> Run:
    path: Path = config_file("loop", **sections)
    return Run(load_config(path, overrides))


def test_nft_runs_no_forward_whose_result_is_unused(config_file, monkeypatch) -> None:
    """16 images, 3 steps, 2 optimiser steps: old runs in the second step only, the reference only with a weight."""
    run = make(config_file, ["nft.beta=0"])
    seen = count_forwards(run, monkeypatch)
    run.loop.run_epoch(0)
    assert seen == {("old", False): 16 * 3 + 8 * 3, ("default", True): 16 * 3}
    # The first schedule copies theta into old after an epoch with decay 0 only; from now on old lags and is needed.
    assert run.objective.on_policy is False
    seen.clear()
    run.loop.run_epoch(1)
    assert seen[("old", False)] == 16 * 3 + 16 * 3

    weighted = make(config_file, ["nft.beta=0.1", "nft.old=copy", "nft.timesteps=1"])
    seen = count_forwards(weighted, monkeypatch)
    weighted.loop.run_epoch(0)
    assert seen == {("old", False): 16 * 3 + 8, ("default", True): 16, ("pretrained", False): 16}
    assert weighted.objective.on_policy is True  # decay 0: old is theta again, the next epoch starts without it


def test_grpo_runs_the_reference_only_with_a_weight(config_file, monkeypatch) -> None:
    grpo = {"objective": "grpo", "rollout": {"sampler": "flow_sde"}}
    run = make(config_file, [], **grpo)
    seen = count_forwards(run, monkeypatch)
    run.loop.run_epoch(0)
    assert seen == {("default", False): 16 * 3, ("default", True): 16 * 3}
    run = make(config_file, ["grpo.beta=0.04", "grpo.timesteps=2"], **grpo)
    seen = count_forwards(run, monkeypatch)
    metrics = run.loop.run_epoch(0)
    assert seen == {("default", False): 48, ("default", True): 32, ("pretrained", False): 32}
    assert metrics["kl"] >= 0


def test_guidance_costs_twice_and_nothing_at_one(config_file, monkeypatch) -> None:
    run = make(config_file, ["rollout.guidance_scale=3", "nft.beta=0"])
    seen = count_forwards(run, monkeypatch)
    run.loop.source(0)
    assert seen == {("old", False): 2 * 16 * 3}


def test_every_lora_parameter_moves_and_nothing_else(config_file) -> None:
    run = make(config_file, [])
    network = run.policy.network
    frozen = {n: p.detach().clone() for n, p in network.named_parameters() if "lora_" not in n}
    before = [p.detach().clone() for _, p in run.policy.trainable]
    run.loop.run_epoch(0)
    run.loop.run_epoch(1)  # A moves only once B has left 0
    for (name, after), old in zip(run.policy.trainable, before, strict=True):
        assert not torch.equal(after, old), f"{name} did not move"
    for name, parameter in network.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), f"{name} is frozen and moved"
    assert not any(p.requires_grad for p in run.policy.vae.parameters())


def test_average_and_old_follow_per_optimiser_step_not_per_micro_batch(config_file, monkeypatch) -> None:
    calls: list[tuple[str, float]] = []
    follow = Policy.ema_update
    monkeypatch.setattr(Policy, "ema_update", lambda self, n, d: (calls.append((n, d)), follow(self, n, d))[1])
    run = make(config_file, ["optimise.micro_batch=0.25", "nft.old=[0, 0.25, 0.001, 0.5]"])
    run.loop.run_epoch(0)
    assert calls == [("ema", 0.9), ("ema", 0.9), ("old", 0.25 + 0.001 * 2)]


def test_metrics_hold_no_graph(config_file) -> None:
    run = make(config_file, [])
    run.loop.run_epoch(0)
    assert all(not isinstance(v, torch.Tensor) for v in run.loop.run_epoch(1).values())
    assert run.objective.metrics() == {}


def test_non_finite_gradients_stop_the_run_before_an_update(config_file, monkeypatch) -> None:
    """The first two steps are left out, the third ends the run, and says with which prompts."""
    run = make(config_file, ["nft.beta=0"])
    monkeypatch.setattr(type(run.objective), "loss", lambda self, phi, rows: phi.sum(0) * float("nan"))
    before = run.policy.state("default")
    metrics = run.loop.run_epoch(0)
    assert (metrics["skipped"], metrics["step"], metrics["loss"], metrics["grad_norm"]) == (2, 0, None, None)
    with pytest.raises(TrainingError, match="not finite, 3 times in a row; nothing was updated") as caught:
        run.loop.run_epoch(1)
    assert all(torch.equal(v, before[k]) for k, v in run.policy.state("default").items())
    details = caught.value.details
    assert details["epoch"] == 2 and details["prompts"] and len(details["gradients_not_finite"]) == len(before)


def test_a_skipped_step_leaves_no_trace(config_file, monkeypatch) -> None:
    """One bad step of two: the other one is taken as if it were alone, and the count in a row starts again."""
    run = make(config_file, [])
    monkeypatch.setattr("diffrl.run.loop.MAX_SKIPPED", 1)
    loss, calls = type(run.objective).loss, []

    def flaky(self, phi, rows):
        calls.append(0)
        return loss(self, phi, rows) * (float("inf") if len(calls) <= 2 else 1.0)  # the first step's micro-batches

    monkeypatch.setattr(type(run.objective), "loss", flaky)
    first, second = run.loop.run_epoch(0), run.loop.run_epoch(1)
    assert (first["skipped"], first["step"]) == (1, 1) and first["grad_norm"] > 0
    assert (second["skipped"], second["step"]) == (1, 3)
    assert all(bool(v.isfinite().all()) for v in run.policy.state("default").values())


def test_training_schedule_is_the_plain_pipelines(config_file) -> None:
    """Rows are trained at the very levels that the plain pipeline samples with."""
    run = make(config_file, [])
    rollout, _, _ = run.loop.source(0)
    pairs = torch.tensor([[0, 0], [0, 1], [0, 2]])
    rows = run.objective.rows(rollout, torch.zeros(16, 1), pairs, (0, 0, 0))
    scheduler = run.policy.backbone.pipe.scheduler
    scheduler.set_timesteps(3)
    assert torch.equal(rows.t, scheduler.sigmas[:3].float())
    assert rows.t.dtype == torch.float32
    different = run.objective.rows(rollout, torch.zeros(16, 1), pairs, (0, 1, 0))
    assert not torch.equal(rows.x_t, different.x_t)  # fresh noise in every epoch


def test_watched_rewards_are_evaluated_and_never_optimised(config_file) -> None:
    reward = {"plugin": str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness", "power": 2.0}
    run = make(config_file, [], watch={"squared": reward})
    assert run.scorer.names == ["redness"]
    judged = run.evaluation.scores()
    measured = {"eval/redness", "eval/squared", "eval/diversity", "eval/saturation", "eval/saturation/std"}
    assert measured == judged.keys()
    assert "reward/squared" not in run.loop.run_epoch(0)


def test_bf16_keeps_the_lora_in_fp32(config_file) -> None:
    run = make(config_file, ["optimise.precision=bf16"])
    run.loop.run_epoch(0)
    assert {p.dtype for _, p in run.policy.trainable} == {torch.float32}
    base = [p for n, p in run.policy.network.named_parameters() if "lora_" not in n]
    assert {p.dtype for p in base} == {torch.bfloat16}
    moments = [s["exp_avg"].dtype for s in run.optimiser.state.values()]
    assert moments and set(moments) == {torch.float32}
