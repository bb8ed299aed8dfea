"""Which candidates are extremes, what ranks say, and when scouting pays: by hand, and against 20,000 drawn groups."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

from diffrl.methods.scout import CandidateSelection, break_even, extremes, spread
from diffrl.rewards.compose import ScoreTransform
from diffrl.stats import rank_correlation


def test_extremes_are_the_best_and_the_worst_and_ties_go_to_the_first() -> None:
    scores = torch.tensor([[3.0, 1, 2, 5, 4, 0], [1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1]])
    assert extremes(scores, 4).tolist() == [[1, 3, 4, 5], [0, 1, 4, 5], [1, 2, 3, 4]]
    assert extremes(scores, 3).tolist()[0] == [3, 4, 5]
    assert extremes(scores, 6).tolist() == [list(range(6))] * 3
    missing = torch.tensor([[math.nan, 1, 2, math.nan, 9, -9], [math.nan] * 6])
    assert extremes(missing, 2).tolist() == [[4, 5], [0, 5]]


def test_scouts_of_several_rewards_are_ranked_by_their_weighted_sum() -> None:
    """Two rewards, one of which counts down and ten times as much; what is watched behind them counts for nothing."""
    processes, weights = SimpleNamespace(gather=lambda rows: rows), torch.tensor([1.0, -10.0])
    rollouts: Any = SimpleNamespace(processes=processes, group_size=2)
    scouting = CandidateSelection(
        rollouts, ScoreTransform(["a", "b", "watched"], {}), weights, candidates=4, steps=1, cost=2.0
    )
    scores = torch.tensor(
        [[9.0, 0.5, 0], [0, 0, 50], [1, 0, 0], [4, 1, 99], [0, 3, 0], [9, 1, 0], [0, 1, 0], [5, 1, 7]]
    )
    members = scouting._members(scores, prompts=2)
    assert members.tolist() == [[0, 3], [0, 1]]  # totals 4, 0, 1, -6 and -30, -1, -10, -5
    assert scouting.metrics(torch.tensor([1.0, 0, 0, 1]))["scout/rank_correlation"] == pytest.approx(1)


def test_the_rank_correlation_is_scipys_within_prompts() -> None:
    source = torch.Generator().manual_seed(0)
    one = torch.randn(5, 9, generator=source)
    other = one + torch.randn(5, 9, generator=source)
    other[:, :4] = other[:, :4].round()  # some tie
    want = sum(stats.spearmanr(a, b).statistic for a, b in zip(one.numpy(), other.numpy(), strict=True)) / 5
    assert rank_correlation(one, other) == pytest.approx(want, abs=1e-12)
    shifted = other + torch.arange(5.0)[:, None]  # what is common to a prompt counts for nothing
    assert rank_correlation(one, shifted) == pytest.approx(want, abs=1e-12)
    other[0], one[1], other[2, 3] = 1.0, 2.0, math.nan
    want = sum(stats.spearmanr(one[i].numpy(), other[i].numpy()).statistic for i in (3, 4)) / 2
    assert rank_correlation(one, other) == pytest.approx(want, abs=1e-12)
    assert rank_correlation(one[:2], other[:2]) is None


@pytest.mark.parametrize(("images", "keep", "rho"), [(96, 24, 1.0), (96, 24, 0.7), (96, 24, 0.5), (48, 16, 0.7)])
def test_scouting_pays_from_the_correlation_on_that_is_told(images: int, keep: int, rho: float) -> None:
    """The variance over that of an unchosen group is 1 / (1 - r^2 (1 - 1/V)); at the break-even it is the cost."""
    source = torch.Generator().manual_seed(1)
    scouts = torch.randn(20_000, images, generator=source, dtype=torch.float64)
    full = rho * scouts + math.sqrt(1 - rho**2) * torch.randn(scouts.shape, generator=source, dtype=torch.float64)
    chosen = extremes(scouts, keep)
    a, b, v = scouts.gather(1, chosen), full.gather(1, chosen), spread(scouts, chosen)
    gain = float(b.var(1).sum() / full.var(1).sum())
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    r = float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())
    assert gain == pytest.approx(1 / (1 - r**2 * (1 - 1 / v)), rel=0.01)
    assert break_even(gain, v) == pytest.approx(r, abs=0.01)
    ranks = rank_correlation(a[:4000], b[:4000])
    assert ranks == pytest.approx(r, abs=0.05), "ranks stand for the correlation"
    if (images, rho) == (96, 1.0):  # Sol-RL's numbers: deviations of the very images, and what the docs say of them
        widths = [float(values.var(1, correction=0).sum()) for values in (b, full)]
        assert math.sqrt(widths[0] / widths[1]) == pytest.approx(1.69, abs=0.02)
        assert v == pytest.approx(2.95, abs=0.02) and break_even(1.6, v) == pytest.approx(0.753, abs=0.005)


def test_what_costs_more_than_it_can_bring_never_pays() -> None:
    assert break_even(3.0, 2.5) == break_even(1.5, 1.0) == 1.0
    assert break_even(1.0, 2.5) == 0.0
    flat = torch.ones(2, 6)
    assert spread(flat, extremes(flat, 2)) == 1.0
