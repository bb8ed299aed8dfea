"""Both objectives against literal float64 transcriptions of their equations, values and gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffrl.methods.nft.objective import contrastive_losses, nft_loss
from diffrl.methods.shared.steps import grpo_loss
from diffrl.objectives.objective import Decay
from diffrl.objectives.rows import row_sigmas

B, SHAPE = 6, (3, 4, 4)


def fixed(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nft_by_hand(x0, eps, t, v, v_old, a, a_max, b):
    """DiffusionNFT (methods section 2), one sample at a time, in the order the equations are written."""
    total = []
    for i in range(len(x0)):
        r = max(-a_max, min(a_max, float(a[i]))) / (2 * a_max) + 0.5
        x_t = (1 - t[i]) * x0[i] + t[i] * eps[i]
        v_plus = (1 - b) * v_old[i] + b * v[i]
        v_minus = (1 + b) * v_old[i] - b * v[i]
        sides = []
        for side in (v_plus, v_minus):
            x0_side = x_t - t[i] * side
            w = max(float((x0_side - x0[i]).abs().mean()), 1e-5)
            sides.append(((x0_side - x0[i]) ** 2).mean() / w)
        total.append(a_max / b * (r * sides[0] + (1 - r) * sides[1]))
    return torch.stack(total)


@pytest.mark.parametrize("b", [1.0, 0.1])
def test_nft_loss_is_the_papers(b: float) -> None:
    x0, eps, v_old = fixed(0, B, *SHAPE), fixed(1, B, *SHAPE), fixed(2, B, *SHAPE)
    v = (v_old + 0.3 * fixed(3, B, *SHAPE)).requires_grad_()
    t = torch.linspace(0.05, 1.0, B, dtype=torch.float64)
    a = torch.tensor([-9.0, -1.0, 0.0, 0.5, 4.9, 7.0], dtype=torch.float64)  # both sides of the clip
    x_t = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * eps
    level = t.view(-1, 1, 1, 1)
    ours = nft_loss(contrastive_losses(x0, x_t - level * v, x_t - level * v_old, b), a[:, None], 5.0, b)[:, 0]
    theirs = nft_by_hand(x0, eps, t, v, v_old, a, 5.0, b)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    mine = torch.autograd.grad(ours.sum(), v, retain_graph=True)[0]
    # Methods section 5: the output cotangent is c_base + A c_slope.
    dims = math.prod(SHAPE)
    x0_plus, x0_minus = x_t - level * ((1 - b) * v_old + b * v), x_t - level * ((1 + b) * v_old - b * v)
    w_plus, w_minus = ((x - x0).abs().mean((1, 2, 3), keepdim=True) for x in (x0_plus, x0_minus))
    d_plus = -2 * level * b * (x0_plus - x0) / w_plus / dims
    d_minus = 2 * level * b * (x0_minus - x0) / w_minus / dims
    base, slope = 5.0 / (2 * b) * (d_plus + d_minus), 1 / (2 * b) * (d_plus - d_minus)
    by_hand = base + a.clamp(-5, 5).view(-1, 1, 1, 1) * slope
    assert torch.allclose(mine, by_hand, rtol=1e-9, atol=1e-14)


def test_nft_on_policy_gradient_pulls_towards_good_images_only() -> None:
    """At theta = old the two sides cancel for A = 0, and the gradient is linear in A."""
    x0, eps = fixed(0, B, *SHAPE), fixed(1, B, *SHAPE)
    v = fixed(2, B, *SHAPE).requires_grad_()
    x_t = 0.4 * x0 + 0.6 * eps
    x0_theta = x_t - 0.6 * v
    phi = contrastive_losses(x0, x0_theta, x0_theta.detach(), 1.0)

    def gradient(a: float) -> torch.Tensor:
        loss = nft_loss(phi, torch.full((B, 1), a, dtype=torch.float64), 5.0, 1.0).sum()
        return torch.autograd.grad(loss, v, retain_graph=True)[0]

    assert gradient(0.0).abs().max() < 1e-15
    assert torch.allclose(gradient(2.0), -2 * gradient(-1.0), rtol=1e-12)


def test_grpo_loss_is_the_papers() -> None:
    log_prob, sampled = fixed(0, B) * 1e-3, fixed(1, B) * 1e-3
    a = fixed(2, B, 2) * 4
    ours = grpo_loss(log_prob, sampled, a, 1e-4, 5.0)
    for i in range(B):
        for k in range(2):
            ratio = math.exp(float(log_prob[i] - sampled[i]))
            clipped = min(max(ratio, 1 - 1e-4), 1 + 1e-4)
            value = max(-5.0, min(5.0, float(a[i, k])))
            assert float(ours[i, k]) == pytest.approx(-min(ratio * value, clipped * value), rel=1e-12)


def test_grpo_gradient_vanishes_where_the_clip_holds() -> None:
    log_prob = torch.tensor([0.1, -0.1, 0.1, -0.1], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64)
    grpo_loss(log_prob, torch.zeros(4, dtype=torch.float64), a, 1e-4, 5.0).sum().backward()
    gradient = log_prob.grad
    assert gradient[0] == 0 and gradient[3] == 0  # already moved the right way: clipped
    assert gradient[1] == pytest.approx(-math.exp(-0.1)) and gradient[2] == pytest.approx(math.exp(0.1))


def test_published_decay_schedules() -> None:
    assert [Decay(slope=0.0)(s) for s in (0, 100)] == [0.0, 0.0]
    second = Decay(slope=0.001, cap=0.5)
    assert [second(s) for s in (0, 100, 500, 9000)] == pytest.approx([0.0, 0.1, 0.5, 0.5])
    third = Decay(start=75, slope=0.0075, cap=0.999)
    assert [third(s) for s in (0, 74, 75, 95, 1000)] == pytest.approx([0.0, 0.0, 0.0, 0.15, 0.999])
    crd = Decay(value=0.25, slope=0.005, cap=0.999)
    assert [crd(s) for s in (0, 50, 1000)] == pytest.approx([0.25, 0.5, 0.999])


@pytest.mark.parametrize(("levels", "count"), [(None, 5), (None, 3), (2, 2), (3, 2)])
def test_trained_timesteps_are_the_noisiest_of_the_schedule_without_repeats(levels: int | None, count: int) -> None:
    schedule = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    rollout: Any = SimpleNamespace(schedule=schedule)
    images = 64
    names: list[tuple[int | str, ...]] = [(0, f"prompt {i}") for i in range(images) for _ in range(count)]
    number = torch.arange(count).repeat(images)
    t = row_sigmas(rollout, names, number, count, "schedule", levels).view(images, count)
    allowed = schedule[: levels or 5]
    assert set(t.flatten().tolist()) == set(allowed.tolist())  # all of them are used, and no other
    assert all(len(set(row)) == count for row in t.tolist())
