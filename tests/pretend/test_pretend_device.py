"""The pretend device keeps CUDA's rules: what CUDA would refuse raises, where the host would wait is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pretend_cuda
import pytest
import torch
from torch import nn

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(12.0, device=DEVICE).view(3, 4)


def test_the_real_code_paths_run_on_it(x: torch.Tensor) -> None:
    assert torch.cuda.is_available() and x.is_cuda and (x @ x.T).device == DEVICE
    layer = nn.Linear(4, 5).to(DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    layer(x).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert layer.weight.grad is not None and layer.weight.grad.is_cuda
    torch.testing.assert_close((x @ x.T).cpu(), x.cpu() @ x.cpu().T)
    assert nn.Conv2d(3, 4, 3).to(DEVICE)(torch.randn(1, 3, 8, 8, device=DEVICE)).is_cuda


def test_memory_is_counted_and_given_back() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    big = torch.zeros(1 << 20, device=DEVICE)
    held = torch.cuda.memory_allocated() - before
    del big
    assert held == 4 << 20 and torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + held
    view = torch.zeros(8, device=DEVICE)[2:]
    assert torch.cuda.memory_allocated() - before == 32 and len(view) == 6


def test_random_numbers_are_the_device_s_own() -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.randn(4, device=DEVICE)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first.cpu(), torch.randn(4, device=DEVICE).cpu())
    mine = torch.Generator(DEVICE).manual_seed(3)
    assert torch.randn(4, device=DEVICE, generator=mine).is_cuda


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a sum with the host's": (lambda x: x + torch.ones(4), "same device"),
    "the host's first": (lambda x: torch.ones(3, 4) * x, "same device"),
    "joined with the host's": (lambda x: torch.cat([x, torch.ones(3, 4)]), "same device"),
    "chosen from the host's": (lambda x: torch.where(x > 0, x, torch.zeros(4)), "same device"),
    "selected by the host's": (lambda x: torch.index_select(x, 0, torch.tensor([0])), "same device"),
    "embedded by the host's": (lambda x: nn.functional.embedding(torch.tensor([1]), x), "same device"),
    "a layer of the host": (lambda x: nn.Linear(4, 5)(x), "same device"),
    "written into the host's": (lambda x: torch.ones(3, 4).add_(x), "same device"),
    "a generator of the host": (lambda x: torch.randn(2, device=DEVICE, generator=torch.Generator()), "generator"),
    "read by numpy": (lambda x: x.numpy(), "host memory first"),
    "pinned": (lambda x: x.new_zeros(2).pin_memory(), "(?i)pin"),
    "a device that is not there": (lambda x: torch.tensor([1, 2], device="cuda:1"), "ordinal"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_raises(x: torch.Tensor, name: str) -> None:
    mistake, message = MISTAKES[name]
    with pytest.raises((RuntimeError, TypeError), match=message):
        mistake(x)


def test_a_number_of_the_host_may_stand_beside(x: torch.Tensor) -> None:
    assert (x + torch.tensor(1.0)).is_cuda and x[torch.tensor([0, 1])].is_cuda


WAITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "item": (lambda x: x.sum().item(), "read"),
    "float": (lambda x: float(x[0, 0]), "read"),
    "to the host": (lambda x: x.cpu(), "read"),
    "mask": (lambda x: x[x > 0], "read"),
    "nonzero": (lambda x: x.nonzero(), "read"),
    "equal": (lambda x: torch.equal(x, x), "read"),
    "from a list": (lambda x: torch.tensor([1.0, 2.0], device=DEVICE), "copy"),
    "from the host": (lambda x: torch.ones(3).to(DEVICE), "copy"),
    "an index of the host": (lambda x: x[torch.tensor([0, 1])], "copy"),
    "a copy nobody waits for": (lambda x: x.to("cpu", non_blocking=True), "race"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "sync"),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_told(x: torch.Tensor, name: str) -> None:
    with pretend_cuda.waits() as seen:
        WAITS[name][0](x)
    assert {kind for kind, _, _ in seen} == {WAITS[name][1]}


def test_what_is_queued_is_no_wait_and_cuda_s_own_switch_raises(x: torch.Tensor) -> None:
    with pretend_cuda.waits() as seen:
        y = (x @ x.T).softmax(-1) + torch.ones(3).to(DEVICE, non_blocking=True)
        y.new_full((3,), 1.0).mul_(2)
    assert not seen
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            y.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
