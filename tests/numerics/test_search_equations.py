"""Test-time search against its equations in float64: resampling, the steered limit, mutations, the guided ODE."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from diffrl.forward import FlowMatching, Prediction, Process, VariancePreserving
from diffrl.samplers import flow_sde, ode_step
from diffrl_lab.search.equations import (
    MIX,
    effective_size,
    log_potential,
    mixed_noise,
    mutated,
    reward_gradient,
    systematic,
    tournament,
)
from diffrl_lab.search.methods import GENERATIONS, Generation, generations

FLOW = FlowMatching()


def exact(process: Process, x: Tensor, t: Tensor, mean: float = 0.0) -> Prediction:
    """What a perfect network says of data N(mean, 1)."""
    alpha, sigma = (value.view(-1, 1) for value in (process.alpha(t), process.sigma(t)))
    x0 = mean + alpha * (x - alpha * mean) / (alpha**2 + sigma**2)
    eps = sigma * (x - alpha * mean) / (alpha**2 + sigma**2)
    return Prediction(x0, eps, process.velocity(x0, eps, t))


@pytest.mark.parametrize("count", [1, 2, 7, 16, 100])
def test_particles_of_equal_weight_go_on_as_they_are(count: int) -> None:
    for u in (0.001, 0.5, 0.999):
        assert systematic(torch.full((count,), -3.7, dtype=torch.float64), u).tolist() == list(range(count))


def test_systematic_resampling_has_the_weights_as_its_means() -> None:
    log_weights = torch.tensor([0.0, 1.0, -2.0, 0.5, -30.0], dtype=torch.float64)
    share, draws = log_weights.softmax(0), 2000
    counts = torch.zeros(5, dtype=torch.float64)
    for i in range(draws):
        children = torch.bincount(systematic(log_weights, (i + 0.5) / draws), minlength=5)
        assert ((children >= (5 * share).floor()) & (children <= (5 * share).ceil())).all()
        counts += children
    torch.testing.assert_close(counts / draws, 5 * share, rtol=0, atol=2 / draws)


def test_effective_size_and_potential() -> None:
    assert float(effective_size(torch.zeros(8))) == pytest.approx(8)
    assert float(effective_size(torch.tensor([0.0, -1e3, -1e3]))) == pytest.approx(1)
    assert torch.allclose(effective_size(log_potential(torch.randn(3, 6), torch.zeros(3, 6), 1e9)), torch.tensor(6.0))
    path = torch.randn(5, 4, dtype=torch.float64)  # r of four particles on their way: the factors telescope
    total = sum(log_potential(after, before, 0.3) for before, after in pairwise(path))
    torch.testing.assert_close(total, (path[-1] - path[0]) / 0.3)


def test_steered_particles_reach_the_tilted_distribution() -> None:
    """N(0, 1) times exp(x / T) is N(1 / T, 1); the SDE with the exact score, weighed at every step."""
    generator, count, temperature = torch.Generator().manual_seed(0), 20_000, 2.0
    x = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    sigmas = torch.linspace(1, 0, 41, dtype=torch.float64).tolist()
    log_weights, before = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    resampled = 0
    for t, t_next in pairwise(sigmas):
        levels = [torch.full((count,), level, dtype=torch.float64) for level in (t, t_next)]
        prediction = exact(FLOW, x, levels[0])
        log_weights += log_potential(prediction.x0[:, 0], before, temperature)
        before = prediction.x0[:, 0]
        if float(effective_size(log_weights)) < 0.97 * count:
            rows = systematic(log_weights, float(torch.rand((), generator=generator)))
            x, before, log_weights = x[rows], before[rows], torch.zeros_like(log_weights)
            prediction = exact(FLOW, x, levels[0])
            resampled += 1
        mean, std = flow_sde(x, prediction.v, *levels, 0.7, sigmas[1])
        x = mean + std * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    log_weights += log_potential(x[:, 0], before, temperature)
    share = log_weights.softmax(0)
    steered = float((share * x[:, 0]).sum())
    assert resampled > 1 and steered == pytest.approx(1 / temperature, abs=0.05)
    assert float((share * (x[:, 0] - steered).square()).sum()) == pytest.approx(1.0, abs=0.1)


def test_children_are_gaussian_at_the_start_and_wider_on_the_way() -> None:
    generator = torch.Generator().manual_seed(1)
    x, eps = torch.randn(2, 100_000, generator=generator, dtype=torch.float64)
    child = mixed_noise(x, eps)
    assert float(child.mean()) == pytest.approx(0, abs=0.01) and float(child.var()) == pytest.approx(1, abs=0.01)
    assert float((child * x).mean()) == pytest.approx(math.sqrt(1 - MIX**2), abs=0.01)
    assert float(mutated(x, eps, 0.5).var()) == pytest.approx(1.25, abs=0.02)


def test_a_tournament_is_won_by_the_best_of_those_who_meet() -> None:
    value = torch.arange(10.0)
    draws = torch.linspace(0, 1, 10).repeat(2, 1)  # the last of the first row does not meet; of the second, the first
    draws[1] = draws[1].flip(0)
    assert tournament(value, draws).tolist() == [8, 9]
    assert tournament(torch.tensor([3.0]), torch.rand(4, 1)).tolist() == [0] * 4


VP = VariancePreserving(torch.linspace(0.9999, 0.001, 200, dtype=torch.float64))


@pytest.mark.parametrize("process", [FLOW, VP])
def test_a_linear_reward_guides_gaussian_data_to_its_tilted_distribution(process: Process) -> None:
    """Data N(0, 1), r = b x: p exp(w r) is N(w b, 1), and the guided ODE draws it."""
    slope, w = 0.4, 2.0
    x = torch.randn(4000, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    start = x.clone()
    for t, t_next in pairwise(torch.linspace(1, 0, 201, dtype=torch.float64).tolist()):
        levels = [torch.full((len(x),), level, dtype=torch.float64) for level in (t, t_next)]
        prediction = exact(process, x, levels[0])
        guided = reward_gradient(x, prediction, torch.full_like(x, slope), levels[0], w, process)
        alpha, sigma = process.alpha(levels[0]).view(-1, 1), process.sigma(levels[0]).view(-1, 1)
        torch.testing.assert_close(alpha * guided.x0 + sigma * guided.eps, x)  # the three forms still agree
        x, _ = ode_step("ddim", x, guided, *levels, None, process)
    assert float((x - start).mean()) == pytest.approx(w * slope, abs=0.03)
    assert float(x.std() / start.std()) == pytest.approx(1.0, abs=0.03)


def test_for_flow_matching_the_guidance_is_flow_nrg_s() -> None:
    """v~ = v - w t / (1 - t) grad_{x_t} r, with grad_{x_t} r = (1 - t) / ((1 - t)^2 + t^2) grad_{x0} r."""
    x, gradient = torch.randn(2, 5, 1, dtype=torch.float64)
    t = torch.tensor([0.1, 0.3, 0.5, 0.8, 0.99], dtype=torch.float64)
    prediction, s = exact(FLOW, x, t), t.view(-1, 1)
    inner = (1 - s) / ((1 - s) ** 2 + s**2) * gradient
    wanted = prediction.v - 3.0 * s / (1 - s) * inner
    torch.testing.assert_close(reward_gradient(x, prediction, gradient, t, 3.0, FLOW).v, wanted)


@pytest.mark.parametrize("budget", [1, 9, 10, 11, 20, 39, 40, 100, 320, 641, 4450, 99_999])
@pytest.mark.parametrize("cost", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 4, 10])
def test_generations_spend_the_budget_and_no_more(budget: int, cost: int, steps: int) -> None:
    plan = generations(budget, steps, cost)
    spent = sum(one.children * (steps - one.step) * cost for one in plan)
    assert spent <= budget
    if budget < steps * cost:
        assert plan == []
    else:
        assert plan[0].step == 0 and budget - spent < max(steps - round(GENERATIONS[-1][0] * steps), 1) * cost


def test_the_paper_s_generations_come_back_at_the_paper_s_budget() -> None:
    """SD2.1: 42 start noises, then 26, 26, 26 and 30 members of which 5 are kept, from steps 0, 20, 30 and 40 of 50."""
    wanted = [(0, 42), (0, 21), (20, 21), (30, 21), (40, 25)]
    assert generations(4450, 50, 1) == [Generation(*pair) for pair in wanted]


def test_without_further_generations_evolution_is_best_of_n() -> None:
    assert generations(64 * 10 + 3, 10, 1, shape=((0.0, 1),)) == [Generation(0, 64)]
