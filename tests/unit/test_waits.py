"""The host never waits for the device inside a step: counted on a stand-in (tests/waits.py)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from covering import some
from waits import DEVICE, OnDevice, Waits, marked

from diffrl.config import load_config
from diffrl.objectives.advantages import ScoredBatch
from diffrl.run.train import Run

GRPO = {"objective": "grpo", "rollout": {"sampler": "flow_sde", "window": 2}, "grpo": {"beta": 0.04}}
CRD: dict[str, Any] = {"objective": "crd", "crd": {"timesteps": 2}}
DPPO = GRPO | {"grpo": {"delta": 1e-7, "beta": 0.04}}
METHODS: dict[str, dict[str, Any]] = {"nft": {"nft": {"beta": 0.1}}, "grpo": GRPO, "dppo": DPPO, "crd": CRD}


def waits_of(config_file: Any, monkeypatch: Any, method: str, *overrides: str) -> tuple[Counter, Counter, int]:
    """Waits of an epoch's rollout and of its optimisation, and its optimiser steps; old lags behind by then."""
    run = Run(load_config(config_file("waits", **METHODS[method]), list(overrides)))
    run.loop.run_epoch(0)
    run.policy.encode([prompt.text for prompt in run.source.stream.prompts])
    run.policy.device = DEVICE
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: marked(clip(*given)))
    with Waits() as rollout:
        made, scores, _ = run.loop.source(1)
    assert isinstance(made.latents, OnDevice)
    torch.manual_seed(0)
    scored = torch.randn(len(scores), 1)
    groups = torch.arange(made.total) // run.loop.settings.group_size
    advantages = run.objective.shaped(ScoredBatch(scored, torch.ones(1), groups, scored, scored[:, :0]))
    with Waits() as optimise:
        losses, norms = run.loop._optimise(made, advantages, 1)
    run.close()
    assert losses and all(isinstance(loss, OnDevice) for loss in losses), "the stand-in saw nothing"
    return rollout.seen, optimise.seen, len(norms)


@pytest.mark.parametrize("method", some(METHODS, "nft", "dppo", "crd"))
def test_no_step_and_no_micro_batch_waits_for_the_device(config_file, monkeypatch, method: str) -> None:
    """Twice the sampling steps and twice the micro-batches wait as often: a batch of the rollout for whether its
    latents are finite and for its scores, an optimiser step for the norm of its gradient."""
    few, optimised, steps = waits_of(config_file, monkeypatch, method)
    many, split, _ = waits_of(config_file, monkeypatch, method, "rollout.steps=6", "optimise.micro_batch=0.25")
    assert few == many and few["read", "rollout.py:_sample"] == 2  # 16 images in batches of 8
    inside = ("denoising", "samplers", "continuations", "forward", "policy")
    assert not [place for _, place in few if place.startswith(inside) and place not in ENCODING]
    assert optimised == split == {("read", "run/loop.py:_step"): steps} and steps == 2


def test_the_stand_in_sees_what_would_wait() -> None:
    """Reads, masks and blocking copies are seen; what is queued is not."""
    with Waits() as waits:
        x = torch.empty(3, device=DEVICE).fill_(2.0)
        host = torch.arange(2)
        y = (x * host.to(DEVICE, non_blocking=True).sum()).square() + x.new_full((3,), 1.0)
        assert isinstance(y, OnDevice) and y.device == DEVICE and not waits.seen
        for read in (lambda: float(y[0]), lambda: y.tolist(), lambda: y[y > 1], lambda: bool(y.any()), lambda: y.cpu()):
            read()
        assert waits.seen == {("read", "outside"): 5} and not isinstance(y.cpu(), OnDevice)
        host.to(DEVICE), torch.tensor([1.0], device=DEVICE), y[host]
        assert waits.seen["copy", "outside"] == 3


ENCODING = ("policy/conditioning.py:to",)  # an epoch's texts, once
