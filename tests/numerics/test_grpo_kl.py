"""The KL penalty of Flow-GRPO against its equation in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from diffrl.forward import FlowMatching
from diffrl.methods.grpo.objective import GRPO
from diffrl.methods.shared.steps import StepRows
from diffrl.rollout import SamplerSpec

SHAPE = (2, 3, 3)


class Analytic:
    """A policy whose velocity is `gain * x_t`: 0.5 trained, 0.2 pretrained."""

    process = FlowMatching()
    gain = 0.5

    def predict(self, x_t, t, cond, guidance=1.0):
        return self.process.from_velocity(x_t, self.gain * x_t, t)

    def adapter(self, name):
        policy = self

        class Context:
            def __enter__(self):
                policy.gain = 0.2

            def __exit__(self, *_):
                policy.gain = 0.5

        assert name is None
        return Context()


def test_penalty_is_the_gaussian_kl_of_the_step() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *SHAPE, generator=generator, dtype=torch.float64)
    t, t_next = torch.full((4,), 0.8, dtype=torch.float64), torch.full((4,), 0.7, dtype=torch.float64)
    objective = GRPO(SamplerSpec(sampler="flow_sde", noise_level=0.7), beta=0.04)
    rows = StepRows(
        x0=x,
        x_t=x,
        t=t,
        cond=SimpleNamespace(),
        advantages=torch.zeros(4, 1),
        groups=torch.zeros(4),
        on_policy=False,
        pairs=torch.zeros(4, 2, dtype=torch.int64),
        x_next=x,
        t_next=t_next,
        t_second=0.9,
        log_prob=torch.zeros(4, dtype=torch.float64),
    )
    policy = Analytic()
    objective.scalars(policy, rows)
    penalty = objective.penalty(policy, rows)
    s = 0.7 * math.sqrt(0.8 / 0.2)
    dt = -0.1
    coefficient = (1 + s**2 * 0.2 / (2 * 0.8)) * dt
    for i in range(4):
        difference = coefficient * (0.5 - 0.2) * x[i]
        expected = 0.04 * float((difference**2).mean()) / (2 * s**2 * -dt)
        assert float(penalty[i]) == pytest.approx(expected, rel=1e-9)


def test_images_without_a_signal_are_left_out_with_their_kl() -> None:
    """Flow-GRPO's mask `advantages.abs().sum(dim=1) != 0`: of four images one agrees with its group at every step."""
    objective = GRPO(SamplerSpec(sampler="flow_sde", noise_level=0.7), beta=0.04, published=["skip_zero"])
    rollout = SimpleNamespace(trajectory=SimpleNamespace(t=torch.zeros(4, 2)))
    advantages = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, -1.0], [1.0, 1.0]])
    assert objective.selects
    for found in (advantages, advantages[:, :, None]):  # of an image and two rewards, or of its two steps
        pairs = objective.pairs(rollout, found, torch.arange(4), 0)
        assert pairs.tolist() == [[0, 0], [2, 0], [3, 0], [0, 1], [2, 1], [3, 1]]
    assert not GRPO(SamplerSpec(sampler="flow_sde", noise_level=0.7)).selects
