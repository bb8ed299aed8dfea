"""Blocks that are played leave the same bytes and operations as blocks that are run."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from diffrl.config import load_config
from diffrl.memory import fit
from diffrl.memory import step_profile as phases
from diffrl.memory.buffers import Alive
from diffrl.memory.repeats import repeated, runs


class Block(nn.Module):
    """Two streams of one storage, a frozen layer, a trained one, and one that never gets a gradient."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.dead = nn.Linear(width, inner), nn.Linear(inner, width), nn.Linear(width, 1)
        self.up.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([x, y], 1)
        both = both + self.down(torch.nn.functional.gelu(self.up(both) + shift.unsqueeze(1)))
        return both[:, : x.shape[1]], both[:, x.shape[1] :]


class Stack(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute, self.first = recompute, nn.Linear(16, 16)
        self.blocks = nn.ModuleList([*(Block(16, 64) for _ in range(9)), *(Block(16, 32) for _ in range(3))])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            shift = x.new_full((len(x), block.up.out_features), float(number))  # made anew for each block
            again = self.recompute and torch.is_grad_enabled()
            x, y = checkpoint(block, x, y, shift, use_reentrant=False) if again else block(x, y, shift)
        return torch.cat([x, y], 1)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_played_blocks_count_as_real_ones(recompute: bool, grad: bool) -> None:
    counts = []
    for how in (repeated, lambda network, alive: nullcontext()):
        with FakeTensorMode(allow_non_fake_inputs=True):
            network = Stack(recompute)
            assert [len(run) for run in runs(network)] == [9]
            x, y = torch.empty(4, 32, 16), torch.empty(4, 8, 16)
            with Alive(network.parameters()) as alive, how(network, alive), torch.set_grad_enabled(grad):
                output = network(x, y)
                if grad:
                    output.square().mean().backward()
                del output
            with_gradient = [name for name, p in network.named_parameters() if p.grad is not None]
        assert "forward" not in vars(network.blocks[4])
        counts.append((alive.peak, alive.now, alive.operations, with_gradient))
    assert counts[0] == counts[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", ["sd35/nft_ocr", "flux/branch_hpsv2", "chroma/grpo_ocr", "hidream/grpo_ocr", "sdxl/nft_pickscore"]
)
def test_a_recipe_is_counted_as_if_each_block_had_run(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    config = load_config(recipe)
    found = fit.estimate(config)
    monkeypatch.setattr(phases, "repeated", lambda network, alive: nullcontext())
    full = fit.estimate(config)
    assert found.operations == full.operations
    for name, size in full.peaks.items():
        assert found.peaks[name] == pytest.approx(size, rel=1e-4)
