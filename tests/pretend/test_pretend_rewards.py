"""Offloaded rewards on the pretend device: they leave before the network is optimised, and nothing else changes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_runs import config_of

from diffrl.memory.fit import estimate
from diffrl.rewards.protocol import find_offloaded
from diffrl.run.run import Run

MIB = 2**20
LARGE = '''
import torch

class Large:
    """The mean of the images, with 64 MiB of weights that are a factor of one."""

    name = "large"

    def __init__(self, device: str | None = None) -> None:
        self.device = torch.device(device or "cuda")
        self.weights = torch.nn.Linear(4096, 4096, bias=False).requires_grad_(False)
        self.weights.weight.fill_(1.0)
        self.weights.to(self.device)

    @staticmethod
    def footprint(**_):
        return 4096 * 4096 * 4

    def __call__(self, images, prompts, metadata):
        assert self.weights.weight.is_cuda and images.is_cuda
        return images.mean((1, 2, 3)) * self.weights.weight[0, 0]
'''


def test_the_peaks_are_what_is_counted_and_the_lora_is_the_same(config_file: Any, tmp_path: Path) -> None:
    """While sampling and scoring, and while optimising, each within 5 % of what doctor counts."""
    (tmp_path / "large.py").write_text(LARGE)
    reward = {"plugin": f"{tmp_path / 'large.py'}:Large"}
    states, optimising = [], {}
    for offload in ("false", "true", "apart"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        overrides = [f"{table}.offload={offload}" for table in ("rewards.large", "watch.again")]
        config = config_of(config_file, "nft", *overrides, rewards={"large": reward}, watch={"again": reward})
        run, peaks = Run(config), dict[str, int]()

        def split(*given: Any, optimise: Any = run.loop._optimise, peaks: Any = peaks, before: int = before) -> Any:
            peaks["scoring"] = torch.cuda.max_memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            return optimise(*given)

        run.loop._optimise = split  # type: ignore[method-assign]
        run.loop.run_epoch(0)  # moments, and a reference that has moved, are there from the second epoch on
        torch.cuda.reset_peak_memory_stats()
        line = run.loop.run_epoch(1)
        optimising[offload] = torch.cuda.max_memory_allocated() - before
        fit = estimate(config)
        always = sum(fit.parts.values())
        training = max(size for name, size in fit.peaks.items() if name.startswith("training"))
        assert (always + training) / optimising[offload] == pytest.approx(1.0, abs=0.05), offload
        assert ("seconds/offload" in line) == (offload != "false")
        if offload != "false":
            assert (always + max(fit.peaks.values())) / peaks["scoring"] == pytest.approx(1.0, abs=0.05), offload
            inner = find_offloaded(run.scorer.rewards["large"])
            assert inner is not None and not any(p.is_cuda for module in inner.modules for p in module.parameters())
        states.append(run.policy.state())
        run.close()
        del run, split
    for offload in ("true", "apart"):
        assert optimising["false"] - optimising[offload] == pytest.approx(64 * MIB, rel=0.01)
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in state)
