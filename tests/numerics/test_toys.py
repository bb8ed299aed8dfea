"""Checks of the second ring on toys whose answer is known: the calibration's fixed point, noise on a linear flow."""

from __future__ import annotations

import math

import pytest
import torch

from diffrl.samplers import SamplerSpec, euler_step
from diffrl.trainers.dense import calibrated


def test_calibrated_levels_stop_where_gains_begin_to_lose() -> None:
    """A step of N paths gains as often as it loses up to its own level, and loses more beyond it (DenseGRPO's psi)."""
    paths, limits, levels = 200, [0.9, 0.5, 0.2], [0.6, 0.6, 0.6]

    def gains() -> torch.Tensor:
        winners = [round(paths * (0.5 - max(level - limit, 0.0))) for level, limit in zip(levels, limits, strict=True)]
        return torch.stack([torch.where(torch.arange(paths) < n, 1.0, -1.0) for n in winners], 1)

    for _ in range(100):
        levels = calibrated(levels, gains(), 2, 0.01, 5.0)
    assert levels == pytest.approx(limits, abs=0.02)
    share = (gains() > 0).float().mean(0)
    assert ((share - 0.5).abs() * 2 * paths <= 2 * 0.02 * paths + 2).all()
    # What the rule is not told: of N paths that gain by a fair coin, so few are within e1 = 2 of each other.
    even = math.comb(24, 12) / 2**24
    assert even == pytest.approx(0.16, abs=0.005), "so it sinks by chance in five rounds of six, as the page says"


@pytest.mark.parametrize(("spread", "best"), [(3.0, "early"), (1 / 3, "late")])
def test_decaying_noise_makes_samples_most_various_where_the_flow_spreads(spread: float, best: str) -> None:
    """HiCoGen's theorem on data N(0, s^2): what is drawn at t grows by s^2 / ((1 - t)^2 s^2 + t^2) until it is clean.

    So at one budget of noise the early kind gives the largest variance where the flow spreads (s > 1), and the smallest
    where it draws together.
    """
    steps = 400
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64)

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x0 = (1 - t) * spread**2 * x / ((1 - t) ** 2 * spread**2 + t**2)
        return (x - x0) / t

    growth = torch.ones(steps + 1, dtype=torch.float64)  # d x_0 / d x_t, by the package's own steps, from the end on
    for i in reversed(range(steps)):
        t, t_next = levels[i : i + 1], levels[i + 1 : i + 2]
        one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        growth[i] = growth[i + 1] * euler_step(one, velocity(one, t), t, t_next).item()
    at = levels[:-1]
    torch.testing.assert_close(
        growth[:-1].square(), spread**2 / ((1 - at) ** 2 * spread**2 + at**2), rtol=2e-2, atol=1e-3
    )
    falling = SamplerSpec("flow_sde", steps, level=1.0, decay=0.0).step_levels(levels.tolist())
    assert falling is not None and falling[0] == pytest.approx(1.0) and falling[steps // 2] == pytest.approx(0.5)
    early = torch.tensor(falling, dtype=torch.float64)
    kinds = {"early": early, "late": early.flip(0), "even": early.square().mean().sqrt().expand(steps)}
    budgets = [float(eta.square().sum()) for eta in kinds.values()]
    assert budgets == pytest.approx([budgets[0]] * 3)
    variance = {name: float((eta.square() / steps * growth[1:].square()).sum()) for name, eta in kinds.items()}
    worst = "late" if best == "early" else "early"
    assert variance[best] > variance["even"] > variance[worst]
