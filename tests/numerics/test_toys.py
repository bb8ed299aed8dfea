"""Objectives and credits on toys whose answer is known: a 2-D mixture, the calibration's fixed point, a linear flow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffrl.methods.dense.calibration import start_levels
from diffrl.methods.dense.credit import calibrated, gains_of
from diffrl.methods.dpo.objective import pair_slopes
from diffrl.methods.gdro.objective import plackett_luce_slopes
from diffrl.methods.rwr.objective import reward_weights
from diffrl.samplers import SamplerSpec, dance, euler_step

MODES = torch.tensor([[2.0, 2], [2, -2], [-2, 2], [-2, -2]], dtype=torch.float64)
WIDTH = 0.4
REFERENCE = torch.tensor([0.4, 0.3, 0.3, 1e-6], dtype=torch.float64)  # the last mode is never drawn
REWARD = torch.tensor([0.0, 0.5, 1.0, 3.0], dtype=torch.float64)  # and would be worth the most


def velocity(x: Tensor, t: Tensor, weights: Tensor) -> Tensor:
    """(B, 2) E[eps - x0 | x_t] of the mixture: what a network that knows it perfectly says."""
    t = t[:, None]
    variance = (1 - t) ** 2 * WIDTH**2 + t**2
    gap = x[:, None] - (1 - t)[..., None] * MODES
    share = (weights.log() - gap.square().sum(-1) / (2 * variance)).softmax(1)
    x0 = MODES + ((1 - t) * WIDTH**2 / variance)[..., None] * gap
    return (x - (share[..., None] * x0).sum(1)) / t


def trained(slopes: Callable[[Tensor, Tensor], Tensor], group: int) -> Tensor:
    """The mixture's weights after 150 steps of `slopes` (dL/dd of d = e_theta - e_ref (P, G) and rewards (P, G))."""
    source = torch.Generator().manual_seed(0)
    logits = REFERENCE.log().clone().requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.05)
    for _ in range(150):
        mode = torch.multinomial(REFERENCE, 512 * group, replacement=True, generator=source)
        noise = torch.randn(2, len(mode), 2, generator=source, dtype=torch.float64)
        x0 = MODES[mode] + WIDTH * noise[0]
        t = 0.5 + 0.5 * torch.rand(512, generator=source, dtype=torch.float64).repeat_interleave(group)
        eps = noise[1].view(512, group, 2)[:, :1].expand(-1, group, 2).reshape(-1, 2)  # a group shares level and noise
        x = (1 - t[:, None]) * x0 + t[:, None] * eps
        errors = [(velocity(x, t, w) - (eps - x0)).square().mean(1) for w in (logits.softmax(0), REFERENCE)]
        d = (errors[0] - errors[1]).view(512, group)
        optimiser.zero_grad()
        (slopes(d.detach(), REWARD[mode].view(512, group)) * d).sum().backward()
        optimiser.step()
    return logits.detach().softmax(0)


def tilt(weights: Tensor) -> float:
    """How far log p / p_ref rises per unit of reward; it is to look like p_ref exp(r / b) where the reference draws."""
    ratio = (weights / REFERENCE).log()[:3]
    assert ratio[0] < ratio[1] < ratio[2] and ratio[0] < 0 < ratio[2]
    assert 0.3 < float((ratio[1] - ratio[0]) / (ratio[2] - ratio[0])) < 0.75, "log-ratios are even, as rewards are"
    assert weights[3] < 0.03, "the mode that the reference never draws is not found, whatever it is worth"
    return float(ratio[2] - ratio[0])


def dpo(b: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Pairs as Bradley and Terry would label them: the first wins with the logistic chance of the difference."""

    def slopes(d: Tensor, r: Tensor) -> Tensor:
        found = torch.zeros_like(d)
        for winner in (0, 1):
            a = torch.zeros_like(d)
            a[:, winner], a[:, 1 - winner] = 1, -1
            chance = torch.sigmoid(r[:, winner] - r[:, 1 - winner])[:, None]
            found += chance * pair_slopes(d.reshape(-1, 1), a.reshape(-1, 1), len(d), b)[0].view_as(d)
        return found

    return slopes


def test_dpo_on_a_mixture_tilts_the_reference_by_reward_over_b() -> None:
    sharp, soft = (tilt(trained(dpo(b), 2)) for b in (0.5, 1.0))
    assert sharp / soft == pytest.approx(2.0, rel=0.2)


def test_gdro_on_a_mixture_tilts_it_too_and_reaches_no_mode_that_is_never_drawn() -> None:
    slopes = trained(lambda d, r: -0.5 * plackett_luce_slopes(-0.5 * d, r, tau=1.0), 4)  # s = -b d
    assert tilt(slopes) > 0.2


def test_weights_of_mean_one_with_a_penalty_settle_at_tau_over_beta() -> None:
    """ORW-CFM-W2, online, on N(0, 1) with the reward x: a step's minimiser (E[w y] + beta ref) / (E[w] + beta).

    The velocities of Gaussians of one width differ by a shift, so a step takes the mean there. Weights of mean 1 settle
    at (1 / tau) / beta; without the penalty the reward is followed without end, as its paper proves.
    """
    source, tau = torch.Generator().manual_seed(0), 2.0

    def settled(beta: float, rounds: int) -> float:
        mean = 0.0
        for _ in range(rounds):
            x = mean + torch.randn(100_000, 1, generator=source, dtype=torch.float64)
            w = reward_weights(x, torch.zeros(len(x)), weights="softmax", tau=tau)
            assert float(w.mean()) == pytest.approx(1)
            mean = float((w * x).mean()) / (1 + beta)
        return mean

    assert settled(1.0, 20) == pytest.approx(1 / tau, abs=0.02)
    assert settled(2.0, 20) == pytest.approx(1 / tau / 2, abs=0.02)
    assert settled(0.0, 20) == pytest.approx(20 / tau, abs=0.2)


def test_calibrated_levels_stop_where_gains_begin_to_lose() -> None:
    """A step of N paths gains as often as it loses up to its own level, and loses more beyond it (DenseGRPO's psi)."""
    paths, limits, levels = 20_000, [0.9, 0.5, 0.2], [0.6, 0.6, 0.6]

    def gains() -> torch.Tensor:
        winners = [round(paths * (0.5 - max(level - limit, 0.0))) for level, limit in zip(levels, limits, strict=True)]
        return torch.stack([torch.where(torch.arange(paths) < n, 1.0, -1.0) for n in winners], 1)

    for _ in range(100):
        levels = calibrated(levels, gains(), 2, 0.01, 5.0)
    assert levels == pytest.approx(limits, abs=0.02)
    share = (gains() > 0).float().mean(0)
    assert ((share - 0.5).abs() <= 0.03).all()


def test_the_calibration_in_a_closed_loop_on_gaussian_data() -> None:
    """1-D data N(0, 1), the exact velocity, R = -(x - 1)^2, the package's own steps, continuations and gains.

    Each step moves its level until about as many gain as lose, from too much noise and from too little.
    """
    steps = 4
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return (x - (1 - t) * x / ((1 - t) ** 2 + t**2)) / t

    def gains(levels: list[float], paths: int, source: torch.Generator) -> Tensor:
        def noise() -> Tensor:
            return torch.randn(paths, 1, 1, 1, generator=source, dtype=torch.float64)

        def continued(x: Tensor, i: int) -> Tensor:
            for t, t_next in zip(grid[i:-1], grid[i + 1 :], strict=True):
                x = euler_step(x, velocity(x, t), t.expand(paths), t_next.expand(paths))
            return x

        x = noise()
        views = [continued(x, 0)]
        for i, level in enumerate(levels):
            mean, std = dance(x, velocity(x, grid[i]), grid[i].expand(paths), grid[i + 1].expand(paths), level)
            x = mean + std * noise()
            views.append(continued(x, i + 1))
        return gains_of(-(torch.stack(views, 1).flatten(2) - 1).square(), common=False)[..., 0]

    def balance(levels: list[float]) -> Tensor:
        found = gains(levels, 100_000, torch.Generator().manual_seed(1))
        return ((found > 0).double().mean(0) - (found < 0).double().mean(0)).abs()

    def closed(levels: list[float], paths: int, tolerance: float, rounds: int) -> list[float]:
        source = torch.Generator().manual_seed(0)
        for _ in range(rounds):
            levels = calibrated(levels, gains(levels, paths, source), tolerance, 0.01, 5.0)
        return levels

    start = start_levels(grid.tolist(), 0.7)
    for first in ([3 * level for level in start], [level / 3 for level in start]):
        assert float(balance(closed(first, 4000, 2.5, 250)).max()) < 0.08
    assert float(balance([3 * level for level in start]).max()) > 0.1, (
        "too much noise loses: there is something to find"
    )
    assert min(closed(start, 24, 2.0, 50)) > 0.5 * min(start), "few paths do not make the noise vanish"


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
    falling = SamplerSpec("flow_sde", steps, noise_level=(1.0, 0.0)).noise_by_step(levels.tolist())
    assert falling is not None and falling[0] == pytest.approx(1.0) and falling[steps // 2] == pytest.approx(0.5)
    early = torch.tensor(falling, dtype=torch.float64)
    kinds = {"early": early, "late": early.flip(0), "even": early.square().mean().sqrt().expand(steps)}
    budgets = [float(eta.square().sum()) for eta in kinds.values()]
    assert budgets == pytest.approx([budgets[0]] * 3)
    variance = {name: float((eta.square() / steps * growth[1:].square()).sum()) for name, eta in kinds.items()}
    worst = "late" if best == "early" else "early"
    assert variance[best] > variance["even"] > variance[worst]
