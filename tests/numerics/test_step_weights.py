"""TempFlow's weight evens out the steps: |d log p / dv| times it is the same at every step, for every sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffrl.forward import FlowMatching, Process, VariancePreserving
from diffrl.methods.shared.steps import step_weights
from diffrl.samplers import SamplerSpec, gaussian_log_prob, sde_kernel

FLOW = FlowMatching()
VP = VariancePreserving((1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0))


def rollout(levels: Tensor, process: Process, width: int) -> Any:
    steps = SimpleNamespace(t=levels[None, :width], t_next=levels[None, 1 : width + 1], noise_level=None)
    return SimpleNamespace(trajectory=steps, process=process, t_second=float(levels[1]))


def sensitivity(name: str, t: float, t_next: float, second: float, process: Process) -> float:
    """|d log p / dv| for one unit of the step's own noise, by autograd, times the one latent dimension."""
    t_, next_ = torch.tensor([t], dtype=torch.float64), torch.tensor([t_next], dtype=torch.float64)
    x = torch.full((1, 1, 1, 1), 0.3, dtype=torch.float64)
    v = torch.full_like(x, -0.4, requires_grad=True)
    mean, std = sde_kernel(name, x, process.from_velocity(x, v, t_), t_, next_, 0.7, second, process)
    log_prob = gaussian_log_prob((mean + std).detach(), mean, std)
    return abs(float(torch.autograd.grad(log_prob.sum(), v)[0]))


@pytest.mark.parametrize(("name", "process", "width"), [
    ("flow_sde", FLOW, 10), ("dance", FLOW, 10), ("cps", FLOW, 9), ("renoise", FLOW, 9), ("ddim", VP, 9),
])  # fmt: skip
def test_the_weight_evens_out_the_gradients(name: str, process: Process, width: int) -> None:
    levels = torch.linspace(1, 0, 11, dtype=torch.float64)
    spec = SamplerSpec(name, 10, noise_level=0.7)
    weight = step_weights(spec, rollout(levels, process, width))[0]
    assert float(weight.mean()) == pytest.approx(1.0)
    found = [
        float(weight[i]) * sensitivity(name, float(levels[i]), float(levels[i + 1]), float(levels[1]), process)
        for i in range(width)
    ]
    dt = torch.tensor(found) / (levels[:-1] - levels[1:])[:width]
    first = int(name == "flow_sde")  # at t = 1 its level is that of the second step; see the next test
    torch.testing.assert_close(dt[first:] / dt[first], torch.ones_like(dt[first:]), rtol=1e-6, atol=0)


def test_for_flow_sde_it_is_the_steps_own_standard_deviation() -> None:
    levels = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.1, 0.0], dtype=torch.float64)  # uneven steps
    spec, a = SamplerSpec("flow_sde", 5, noise_level=0.7), 0.7
    t, dt = levels[:-1], levels[:-1] - levels[1:]
    s = a * (t / (1 - torch.where(t >= 1, levels[1], t))).sqrt()
    weight = step_weights(spec, rollout(levels, FLOW, 5))[0]
    std = s * dt.sqrt()  # TempFlow's code, at t = 1 with the noise level of the second step
    torch.testing.assert_close(weight, std / std.mean())
    assert step_weights(spec, rollout(levels, FLOW, 1)).tolist() == [[1.0]]  # one trained step
