"""What only a GPU can show, on tiny models: `pytest -m gpu`, a part of `scripts/gpu_proof.py`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from launching import free_port
from sharded_gradients import gradients_of

from diffrl.config import load_config
from diffrl.policy import load_policy
from diffrl.run.train import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GRPO = {"objective": "grpo", "rollout": {"sampler": "flow_sde"}, "grpo": {"beta": 0.04}}
METHODS: dict[str, dict[str, Any]] = {"nft": {}, "grpo": GRPO, "crd": {"objective": "crd"}}


def make(config_file: Callable[..., Path], method: str, *overrides: str) -> Run:
    return Run(load_config(config_file(method, **METHODS[method]), list(overrides)))


@pytest.mark.parametrize("method", METHODS)
def test_no_optimiser_step_waits_for_the_device(config_file, method: str) -> None:
    """CUDA itself raises where the host waits; one wait a step is allowed: for the gradient's norm."""
    run = make(config_file, method)
    run.loop.run_epoch(0)
    rollout, scores, _ = run.loop.source(1)
    advantages = torch.randn(scores.shape[0], 1)
    step, waits = run.loop._step, []

    def counted() -> Any:
        torch.cuda.set_sync_debug_mode("default")
        waits.append(1)
        try:
            return step()
        finally:
            torch.cuda.set_sync_debug_mode("error")

    run.loop._step = counted  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.loop._optimise(rollout, advantages, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.close()
    assert len(waits) == 2  # optimiser steps


def test_an_image_is_the_cpu_s(tiny_model: Path) -> None:
    """The same noise, the same LoRA: latents to float rounding."""
    from tiny import inputs

    found = []
    for device in ("cpu", "cuda"):
        policy = load_policy(str(tiny_model), device=device)
        x, t, cond = inputs(policy)
        with torch.no_grad():
            v = policy.predict(x.to(device), t.to(device), cond.to(device)).v
            found.append((v.cpu(), policy.decode(x.to(device)).cpu()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


def test_attention_has_finite_gradients_where_cudnns_has_not(tiny_model: Path) -> None:
    """cuDNN 9.20 on Hopper: of very negative logits in rows of 128 n + 64 tokens under a mask it makes NaN."""
    load_policy(str(tiny_model), device="cuda")
    q, k, v = (torch.full((1, 1, 704, 64), 0.1, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -960.0
    for tensor in (q, k, v):
        tensor.requires_grad_()
    mask = torch.ones(704, 704, dtype=torch.bool, device="cuda")[None, None]
    torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in (q, k, v))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_epoch_in_half_precision_moves_the_lora(config_file, precision: str) -> None:
    run = make(config_file, "nft", f"optimise.precision={precision}")
    before = run.policy.state("default")
    metrics = [run.loop.run_epoch(epoch) for epoch in range(2)]
    after = run.policy.state("default")
    run.close()
    assert all(line["loss"] is not None for line in metrics)
    assert all(value.isfinite().all() for value in after.values())
    assert any(not torch.equal(before[name], value) for name, value in after.items())


def test_what_is_counted_is_what_is_taken(config_file) -> None:
    """`doctor`'s bytes, without its slack and the context, against the allocator's peak.

    Wide on a true device, whose kernels have workspaces of their own; the slack and the context would bound anything
    at this size.
    """
    from diffrl.memory.fit import estimate

    gc.collect()  # of the tests before
    before = torch.cuda.memory_allocated()
    run = make(config_file, "nft")
    run.loop.run_epoch(0)
    torch.cuda.reset_peak_memory_stats()
    run.loop.run_epoch(1)
    peak = torch.cuda.max_memory_allocated() - before
    fit = estimate(run.config)
    counted = sum(fit.parts.values()) + max(fit.peaks.values())
    assert 0.7 * counted < peak < 1.5 * counted
    run.close()


def test_fsdp2_over_one_process_has_the_plain_gradients(
    config_file, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A plain run leaves a single process unsharded, since it gains nothing: here it is asked for."""

    def ended() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)

    path = config_file("plain")
    plain, _ = gradients_of(path)
    AcceleratorState._reset_state(reset_partial_state=True)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MASTER_PORT": str(free_port()), "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "diffrl.policy.sharding.plugin_of", lambda accelerator: FullyShardedDataParallelPlugin(fsdp_version=2)
    )
    request.addfinalizer(ended)
    sharded, line = gradients_of(config_file("sharded"))
    assert line["sharded"] and len(sharded) == len(plain)
    for ours, theirs in zip(sharded, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3 * float(theirs.abs().max()))
