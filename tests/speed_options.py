"""What makes a run faster or smaller, and what it may change in the first gradient, by the arithmetic of each."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from diffrl.config import load_config
from diffrl.policy.engine import compile_blocks
from diffrl.run.train import Run

# Option: the words of the command line, and the most that the gradient may differ, of its norm. 0: to the bit.
SUMS = 1e-5  # the same products in fp32, summed in another order
OPTIONS: dict[str, tuple[list[str], float]] = {
    "engine.compile": (["engine.compile=true"], SUMS),
    "engine.deterministic": (["engine.deterministic=true"], SUMS),
    "engine.tf32": (["engine.tf32=true"], SUMS),  # the pretend device and a CPU have no such products
    "engine.encoders": (["engine.encoders=apart"], 0.0),
    "engine.decode": (["engine.decode=1"], SUMS),
    "engine.tile_vae": (["engine.tile_vae=true"], 0.0),  # pictures of one tile
    "rollout.batch_size": (["rollout.batch_size=3"], SUMS),
    "optimise.micro_batch": (["optimise.micro_batch=3"], SUMS),
    "optimise.gradient_checkpointing": (["optimise.gradient_checkpointing=true"], 0.0),
}
# Options of other arithmetic: the test that holds each to its own tolerance.
ENGINE = "integration/test_engine.py"
ELSEWHERE = {
    "engine.attention": f"{ENGINE}::test_an_attention_kernel_is_the_networks_or_refused_with_the_reason",
    "engine.base": "unit/test_quantised.py::test_gradients_are_those_of_the_dequantised_model",
    "engine.optimiser": f"{ENGINE}::test_eight_bit_moments_train_and_resume_to_the_bit",
}
METHODS: dict[str, dict[str, Any]] = {
    "nft": {"objective": "nft", "nft": {"beta": 0.1}},
    "grpo": {"objective": "grpo", "rollout": {"sampler": "flow_sde", "window": 2}, "grpo": {"beta": 0.1}},
}


def first_gradient(config: Any) -> torch.Tensor:
    """Of the first optimiser step, with a LoRA that is not 0 anywhere; on the CPU."""
    run = Run(config)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        for _, parameter in run.policy.trainable:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    kept: list[torch.Tensor] = []
    step = run.optimiser.step

    def seen(*arguments: Any, **words: Any) -> Any:
        if not kept:
            kept.extend(p.grad.detach().cpu().flatten().clone() for _, p in run.policy.trainable if p.grad is not None)
        return step(*arguments, **words)

    run.optimiser.step = seen  # type: ignore[method-assign]
    try:
        run.loop.run_epoch(0)
    finally:
        run.close()
        torch.use_deterministic_algorithms(False)
    return torch.cat(kept)


def traced(network: Any) -> None:
    """In the place of `compile_blocks`: as inductor, without its compiler's seconds."""
    compile_blocks(network, backend="aot_eager")


def assert_options_leave_the_gradient(
    config_file: Any, monkeypatch: pytest.MonkeyPatch, method: str, names: Collection[str] = OPTIONS
) -> None:
    """Of a method's first step on this process's device, which is repeated to the bit where nothing is changed."""
    monkeypatch.setattr("diffrl.policy.engine.compile_blocks", traced)

    def gradient(name: str, words: list[str]) -> torch.Tensor:
        return first_gradient(load_config(config_file(name, **METHODS[method]), words))

    plain = gradient("plain", [])
    assert plain.norm() > 0
    chosen = {name: OPTIONS[name] for name in OPTIONS if name in names}
    for name, (words, tolerance) in {"again": ([], 0.0), **chosen}.items():
        found = gradient(name, words)
        assert found.shape == plain.shape
        difference = float((found - plain).norm() / plain.norm())
        assert difference <= tolerance, (name, difference)
    torch.compiler.reset()
