"""What a difference of means is worth: intervals and tests, all of Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy import stats

LEVEL = 0.95


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half the width of its 95 % interval) of independent values; None for fewer than two."""
    n = len(values)
    if n < 2:
        return fmean(values), None
    return fmean(values), float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * stdev(values) / math.sqrt(n)


def p_value(differences: Sequence[float]) -> float | None:
    """Of the paired t-test, two-sided: is their mean 0? None for fewer than two."""
    n = len(differences)
    if n < 2:
        return None
    mean, error = fmean(differences), stdev(differences) / math.sqrt(n)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean) / error, n - 1))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values of one family, corrected for their number (Holm 1979); None stays None and counts for nothing."""
    order = sorted((p, i) for i, p in enumerate(values) if p is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[i] = largest
    return corrected
