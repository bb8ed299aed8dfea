"""The fused LoRA path against peft's own layers: values, gradients, what a graph keeps, and when it starts anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffrl.policy.lora import Adapters, LoraSpec

IN, RANK = 12, 3
NAMES = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out", "single"]


class Attention(nn.Module):
    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(IN, 8), nn.Linear(IN, 8), nn.Linear(IN, 10)
        self.to_out = nn.Linear(10, IN, bias=False)
        self.crossed = crossed

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q, k, v = self.to_q(x), self.to_k(other), self.to_v(other)
        return self.to_out(torch.tanh(q * k).sum(-1, keepdim=True) * v)


class Net(nn.Module):
    def __init__(self, crossed: bool = False) -> None:
        super().__init__()
        self.attn, self.single = Attention(crossed), nn.Linear(IN, IN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.single(x).sin()
        return x + self.attn(x, x.cos() if self.attn.crossed else x)


def twins(dtype: torch.dtype = torch.float64, std: float = 0.3, **kind: bool) -> tuple[Adapters, Adapters]:
    """Two equal networks with LoRAs "default" and "old": ours, and one whose layers are peft's own."""
    torch.manual_seed(0)
    network = Net(**kind)
    made = []
    for plain in (False, True):
        adapters = Adapters(copy.deepcopy(network).to(dtype), LoraSpec(RANK, 5.0), NAMES, cast_input=False)
        adapters.add("old")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for matrix in (*adapters.parameters["default"], *adapters.parameters["old"]):
                if dtype == torch.float64:
                    matrix.data = matrix.data.double()
                matrix.copy_(std * torch.randn(matrix.shape, generator=generator))
        if plain:
            for layer in adapters.layers.values():
                del layer.forward  # type: ignore[method-assign]
        made.append(adapters)
    return made[0], made[1]


def results(adapters: Adapters, x: Tensor) -> list[Tensor]:
    """Output, the input's gradient and every matrix's."""
    x = x.clone().requires_grad_()
    y = adapters.network(x)
    parameters = [p for _, p in adapters.trainable]
    return [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, IN).to(y)).sum(), [x, *parameters])]


def same(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.dtype == other.dtype
        scale = float(other.abs().max())
        assert scale > 0 and float((one - other).abs().max()) <= tolerance * scale, number


@pytest.mark.parametrize("merging", [True, False])
@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, IN), (4, IN)])
def test_values_and_gradients_are_pefts(merging: bool, crossed: bool, shape: tuple[int, ...]) -> None:
    ours, theirs = twins(crossed=crossed)
    ours.fused.merging = merging
    assert [group.names for group in ours.fused.groups] == [NAMES[:3], NAMES[3:4], NAMES[4:]]
    x = torch.randn(shape, dtype=torch.float64)
    for _ in range(2):  # the second time with what was kept, and apart where inputs turned out to differ
        for name in ("default", "old", None):
            with ours.adapter(name), theirs.adapter(name), torch.no_grad():
                torch.testing.assert_close(ours.network(x), theirs.network(x), rtol=1e-12, atol=1e-12)
        same(results(ours, x), results(theirs, x), 1e-12)
    assert (len(ours.fused.groups) > 3) == crossed
    assert all(not group._waiting and group._input is None for group in ours.fused.groups)


@pytest.mark.parametrize("merging", [True, False])
def test_gradcheck(merging: bool) -> None:
    ours, _ = twins()
    ours.fused.merging = merging
    names = [name.replace(".weight", ".default.weight") for name, _ in ours.trainable]
    parameters = tuple(p.detach().clone().requires_grad_() for _, p in ours.trainable)

    def function(x: Tensor, *matrices: Tensor) -> Tensor:
        with torch.no_grad():
            for (_, own), matrix in zip(ours.trainable, matrices, strict=True):
                own.copy_(matrix)
        return _Through.apply(ours, x, *matrices)  # type: ignore[no-untyped-call, no-any-return]

    x = torch.randn(2, 3, IN, dtype=torch.float64, requires_grad=True)
    assert len(names) == 2 * len(NAMES)
    assert torch.autograd.gradcheck(function, (x, *parameters), fast_mode=True)


class _Through(torch.autograd.Function):
    """The network as a function of its matrices: gradcheck moves tensors of its own."""

    @staticmethod
    def forward(ctx: Any, adapters: Adapters, x: Tensor, *matrices: Tensor) -> Tensor:  # type: ignore[override]
        ctx.adapters = adapters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return adapters.network(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.adapters.network(x)
            return None, *torch.autograd.grad(y, [x, *[p for _, p in ctx.adapters.trainable]], dy)


def test_what_was_merged_is_made_anew_when_a_lora_moves() -> None:
    ours, theirs = twins(torch.float32)
    x = torch.randn(2, 5, IN)
    for adapters in (ours, theirs):
        parameters = [p for _, p in adapters.trainable]
        optimiser = torch.optim.AdamW(parameters, lr=0.1)
        for _ in range(2):
            adapters.network(x).square().sum().backward()
            optimiser.step()
            optimiser.zero_grad()
            adapters.ema_update("old", 0.5)
    for name in ("default", "old"):
        with ours.adapter(name), theirs.adapter(name), torch.no_grad():
            torch.testing.assert_close(ours.network(x), theirs.network(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        before = ours.network(x)
    ours.parameters["default"][1].data.mul_(2)  # as an optimiser that writes past torch's count
    ours.fused.forget()
    with torch.no_grad():
        assert not torch.allclose(ours.network(x), before)


def test_the_base_is_never_written_and_its_own_output_stays() -> None:
    ours, _ = twins(torch.float32)
    frozen = {name: p for name, p in ours.network.named_parameters() if "lora" not in name}
    before = {name: (p.clone(), p._version, p.data_ptr()) for name, p in frozen.items()}
    x = torch.randn(2, 5, IN)
    results(ours, x)
    with torch.no_grad(), ours.adapter("old"):
        ours.network(x)
    for name, p in frozen.items():
        assert torch.equal(p, before[name][0]) and (p._version, p.data_ptr()) == before[name][1:]
    torch.manual_seed(0)
    pretrained = Net()
    with torch.no_grad(), ours.adapter(None):
        assert torch.equal(ours.network(x), pretrained(x))


def test_at_most_two_snapshots_are_kept_merged() -> None:
    ours, _ = twins(torch.float32)
    ours.add("third")
    x = torch.randn(2, 5, IN)
    for name in ("old", "default", "third", "default"):
        with ours.adapter(name), torch.no_grad():
            ours.network(x)
    kept = ours.fused.groups[0].shelf._cache
    assert [name for name, _ in kept] == ["third", "default"]


def saved_bytes(adapters: Adapters, x: Tensor) -> int:
    """Of all storages with numbers for each row of x that a graph keeps."""
    rows = x[..., 0].numel()
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() % rows == 0:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = adapters.network(x)
    assert y.requires_grad
    return sum(seen.values())


def test_a_graph_keeps_less_than_pefts() -> None:
    """No `A x` of any layer: its input, which q, k and v share, is all that the LoRA's gradients need."""
    ours, theirs = twins(torch.float32)
    x = torch.randn(4, 50, IN)
    hidden = len(NAMES) * x[..., 0].numel() * RANK * x.element_size()
    assert saved_bytes(ours, x) <= saved_bytes(theirs, x) - hidden
