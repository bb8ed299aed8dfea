"""What a mean or a difference is worth: intervals, tests and rank correlations, the only place for them.

Values are independent: prompts, or seeds. None and NaN mean "not known" and count for nothing. Differences between two
models on the same prompts from the same noise are paired: what all models find hard does not count as noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import scipy  # its parts are loaded when they are first used: scipy.stats takes half a second

if TYPE_CHECKING:
    from torch import Tensor

LEVEL = 0.95  # of every interval; a difference is significant where p < 1 - LEVEL
Values: TypeAlias = "Sequence[float | None] | Sequence[float] | np.ndarray[Any, Any] | Tensor"


def known(values: Values) -> np.ndarray:
    """(n,) float64 of those that are known."""
    array = np.asarray(values, dtype=np.float64)
    return array[~np.isnan(array)]


def differences(before: Values, after: Values) -> np.ndarray:
    """(P,) `after` less `before`, NaN where one of them is not known; (0,) where they cannot be pairs: P differs."""
    if len(before) != len(after):
        return np.empty(0)
    return np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)


def standard_error(values: Values) -> float | None:
    """Of the mean; None for fewer than two values."""
    array = known(values)
    return None if len(array) < 2 else float(array.std(ddof=1)) / math.sqrt(len(array))


def critical(count: float) -> float:
    """How many standard errors the interval of a mean of `count` values has to either side (Student's t)."""
    return float(scipy.stats.t.ppf((1 + LEVEL) / 2, count - 1))


def interval(values: Values) -> tuple[float, float | None]:
    """(mean, half the width of its interval); None for fewer than two values, and NaN is the mean of none."""
    array, error = known(values), standard_error(values)
    mean = float(array.mean()) if len(array) else math.nan
    return mean, None if error is None else critical(len(array)) * error


def p_value(values: Values) -> float | None:
    """Of the t-test, two-sided: is the mean 0? Of `differences` it is the paired test. None for fewer than two."""
    array, error = known(values), standard_error(values)
    return None if error is None else chance(float(array.mean()), error, len(array))


def chance(change: float, error: float, count: float = math.inf) -> float:
    """The two-sided p-value of a change with this standard error, estimated from `count` values (inf: normal)."""
    if error == 0:
        return float(change == 0)
    return float(2 * scipy.stats.t.sf(abs(change) / error, count - 1))


def significant(values: Values) -> bool | None:
    """Does the interval of the mean leave 0 out? None for fewer than two values."""
    p = p_value(values)
    return None if p is None else p < 1 - LEVEL


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values of one family, corrected for their number (Holm 1979); None stays None and counts for nothing."""
    order = sorted((p, i) for i, p in enumerate(values) if p is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[i] = largest
    return corrected


def wilson(count: float, total: float) -> tuple[float, float]:
    """The interval of a share, `count` of `total` independent cases (Wilson 1927); they need not be whole numbers."""
    z2 = float(scipy.stats.norm.ppf((1 + LEVEL) / 2)) ** 2
    middle, spread = (count + z2 / 2) / (total + z2), math.sqrt(z2 * (count * (1 - count / total) + z2 / 4))
    low, high = middle - spread / (total + z2), middle + spread / (total + z2)
    return (0.0 if count == 0 else low), (1.0 if count == total else high)


def rank_correlation(one: Values, other: Values) -> float | None:
    """Spearman's of two tables (P, G) within each row, mean over rows; of vectors (G,) theirs. Ties share a rank.

    Rows where either has no spread, or a value is not known, count for nothing; None where no other is left.
    """
    tables = [np.atleast_2d(np.asarray(each, dtype=np.float64)) for each in (one, other)]
    usable = ~np.isnan(tables[0] + tables[1]).any(1) & np.all([np.ptp(each, axis=1) > 0 for each in tables], axis=0)
    if not usable.any():
        return None
    a, b = (scipy.stats.zscore(scipy.stats.rankdata(each[usable], axis=1), axis=1) for each in tables)
    return float((a * b).mean())
