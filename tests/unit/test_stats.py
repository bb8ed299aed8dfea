"""Intervals, tests and rank correlations: against scipy's own, float64 transcriptions of the books, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats as books

from diffrl import stats

RANDOM = np.random.default_rng(7)
NAN = float("nan")


@pytest.mark.parametrize("count", [2, 3, 40, 2000])
def test_intervals_and_tests_are_scipys(count: int) -> None:
    before, after = RANDOM.normal(0.5, 0.1, (2, count))
    gains = stats.differences(before, after)
    test = books.ttest_rel(after, before)
    low, high = books.ttest_1samp(gains, 0.0).confidence_interval(stats.LEVEL)
    mean, half = stats.interval(gains)
    assert half is not None and (mean - half, mean + half) == pytest.approx((low, high), rel=1e-12, abs=1e-12)
    assert stats.p_value(gains) == pytest.approx(test.pvalue, rel=1e-10)
    assert stats.standard_error(gains) == pytest.approx(books.sem(gains), rel=1e-12)
    assert stats.significant(gains) is bool(low > 0 or high < 0), "an interval without 0 is a p below 1 - LEVEL"
    assert stats.critical(count) == pytest.approx(books.t.ppf(0.975, count - 1), rel=1e-12)


def test_a_t_test_by_hand() -> None:
    """Differences 1, 2, 3: t = 2 sqrt(3) with 2 degrees of freedom, distributed as 1/2 + t / (2 sqrt(2 + t^2))."""
    t = 2 * math.sqrt(3)
    assert stats.p_value([1.0, 2.0, 3.0]) == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-12)
    q = 0.95  # solved for t: sqrt(2 q^2 / (1 - q^2))
    assert stats.interval([1.0, 2.0, 3.0])[1] == pytest.approx(math.sqrt(2 * q**2 / (1 - q**2) / 3), rel=1e-12)


def test_what_is_not_known_counts_for_nothing() -> None:
    assert stats.known([None, 0.5, NAN]).tolist() == [0.5]
    gains = stats.differences([0.1, None, 0.3, 0.4], torch.tensor([0.2, 0.5, NAN, 0.6], dtype=torch.float64))
    np.testing.assert_allclose(gains, [0.1, NAN, NAN, 0.2])
    assert stats.interval(gains) == pytest.approx(stats.interval([0.1, 0.2]))
    assert stats.interval([0.3, None]) == (0.3, None) and stats.p_value([0.3]) is None
    assert stats.significant([]) is None and stats.standard_error([0.3]) is None and math.isnan(stats.interval([])[0])
    assert len(stats.differences([0.1, 0.2], [0.1, 0.2, 0.3])) == 0, "not of the same prompts"


def test_no_spread_at_all() -> None:
    assert stats.p_value([0.0, 0.0]) == 1.0 and stats.p_value([0.2, 0.2]) == 0.0
    assert stats.significant([0.0, 0.0]) is False and stats.significant([0.2, 0.2]) is True


def test_the_normal_chance_of_a_change() -> None:
    assert stats.chance(-1.5, 1.0) == pytest.approx(math.erfc(1.5 / math.sqrt(2)), rel=1e-12)
    assert stats.chance(0.0, 0.0) == 1.0 and stats.chance(0.1, 0.0) == 0.0


def test_holm_by_hand() -> None:
    """Holm (1979): sorted times 4, 3, 2, 1, never falling."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([None, 0.5, 0.9]) == [None, 1.0, 1.0] and stats.holm([]) == []


@pytest.mark.parametrize(("count", "total"), [(3, 10), (0, 10), (10, 10), (1, 1), (37, 512)])
def test_wilsons_interval(count: int, total: int) -> None:
    """The shares p with |share - p| = z sqrt(p (1 - p) / n)."""
    low, high = stats.wilson(count, total)
    z, share = books.norm.ppf(0.975), count / total
    for p, end in ((low, 0), (high, total)):
        assert (
            abs(share - p) == pytest.approx(z * math.sqrt(p * (1 - p) / total), abs=1e-12) or count == end == p * total
        )


def test_rank_correlations_are_scipys_with_ties_and_gaps() -> None:
    one, other = RANDOM.integers(0, 4, (2, 6, 9)).astype(float)
    want = [books.spearmanr(a, b).statistic for a, b in zip(one, other, strict=True)]
    assert stats.rank_correlation(one, other) == pytest.approx(np.mean(want), abs=1e-12)
    assert stats.rank_correlation(one[0], other[0]) == pytest.approx(want[0], abs=1e-12)
    one[0, 3], other[1] = NAN, 2.0
    assert stats.rank_correlation(one, other) == pytest.approx(np.mean(want[2:]), abs=1e-12)
    assert stats.rank_correlation(one[:2], other[:2]) is None, "a gap, and no spread"
    assert stats.rank_correlation([0.1, None], [0.1, 0.2]) is None
