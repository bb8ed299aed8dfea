"""DivGenBench's metrics as pure functions of arrays, in float64 (D2-Align, arXiv 2512.24146), and their intervals.

Symbols: n images, F features, U prompts, R random subsets. Where a function takes weights W (R, n), row r says how
often each image counts, and the result is (R,): the metric of every subset from one matrix product, without new
features.

**Intervals.** The unit is the prompt with all its images, or the image where no prompt is known. The bootstrap draws
with repetition, and repeated images look like lost diversity (IDS and the Vendi score of such samples are far from the
sample's own). So groups of prompts are left out in turn: the grouped jackknife (Shao & Tu 1995, ch. 2.3; Busing et al.
1999 for groups of unequal size), with Student's t of as many groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from diffrl.stats import chance, critical

Array = np.ndarray
REPLICATES = 400  # of ASC's draws
GROUPS = 20  # that are left out in turn, at most
FEWEST = 8  # prompts below which groups say nothing: no interval
_ROWS = 32


def unit(features: Array) -> Array:
    """Rows scaled to length one, float64 (n, F); a row of zeros raises ValueError."""
    e = np.asarray(features, np.float64)
    length = np.linalg.norm(e, axis=1, keepdims=True)
    if not (np.isfinite(length).all() and (length > 0).all()):
        raise ValueError("features that are zero or not finite have no direction")
    return e / length


def mean_cosine(features: Array, weights: Array | None = None) -> Array:
    """Mean pairwise cosine over all pairs of different images, in [-1, 1]: IDS for face embeddings, lower is better.

    features (n, F), weights (R, n) -> (R,), and (1,) without weights. NaN where fewer than two images count.
    """
    e = unit(features)

    def of(w: Array) -> Array:
        square = np.square(w).sum(1)
        # sum_{i != j} w_i w_j e_i . e_j = |sum_i w_i e_i|^2 - sum_i w_i^2 for unit vectors: no (n, n) matrix.
        pairs = np.square(w.sum(1)) - square
        total = np.square(w @ e).sum(1) - square
        return np.divide(total, pairs, out=np.full(len(w), np.nan), where=pairs > 0)

    return _in_blocks(of, weights, len(e))


def _in_blocks(metric: Callable[[Array], Array], weights: Array | None, n: int) -> Array:
    """A metric of weights, float64, some rows at a time: all of them at once would outgrow the features."""
    w = np.ones((1, n)) if weights is None else weights
    parts = [metric(np.asarray(w[i : i + _ROWS], np.float64)) for i in range(0, len(w), _ROWS)]
    return np.concatenate(parts) if parts else np.zeros(0)


def vendi(features: Array, weights: Array | None = None) -> Array:
    """Vendi score: exp of the entropy of the eigenvalues of K / n, K the cosine kernel (Friedman & Dieng 2023).

    An effective number of different images, in [1, n]. features (n, F), weights (R, n) -> (R,), (1,) without weights.
    """
    e = unit(features)
    scores = []
    for row in np.ones((1, len(e))) if weights is None else weights:
        half = e[row > 0] * np.sqrt(row[row > 0] / row.sum())[:, None]
        # K and the features' second moment have the same eigenvalues: take the smaller matrix.
        matrix = half.T @ half if half.shape[1] < len(half) else half @ half.T
        values = np.linalg.eigvalsh(matrix)
        values = values[values > 1e-12]
        scores.append(np.exp(-(values * np.log(values)).sum()))
    return np.array(scores)


def tonal_variety(tones: Array, weights: Array | None = None) -> Array:
    """PVS: std(s) + std(v) + std(c) over images; tones (n, 3) of `tone_of`, weights (R, n) -> (R,)."""
    x = np.asarray(tones, np.float64)
    x = x - x.mean(0)  # the second moment less the squared mean keeps its digits around zero

    def of(w: Array) -> Array:
        amount = w.sum(1, keepdims=True)
        variance = w @ np.square(x) / amount - np.square(w @ x / amount)
        return np.sqrt(np.maximum(variance, 0.0)).sum(1)

    return _in_blocks(of, weights, len(x))


def tone_of(images: Array) -> Array:
    """(s, v, c) of images (B, 3, H, W) in [0, 1]: means of HSV's S and V channel, std of the grayscale image; (B, 3).

    S = 1 - min/max of a pixel's channels (0 for black), V = max; gray as in ITU-R BT.601.
    """
    x = np.asarray(images, np.float64)
    high, low = x.max(1), x.min(1)
    saturation = np.divide(high - low, high, out=np.zeros_like(high), where=high > 0)
    gray = np.tensordot(np.array([0.299, 0.587, 0.114]), x, axes=(0, 1))
    return np.stack([saturation.mean((1, 2)), high.mean((1, 2)), gray.std((1, 2))], 1)


def box_overlap(first: Array, second: Array) -> Array:
    """Intersection over union of every pair of boxes (left, top, right, bottom): (a, 4), (b, 4) -> (a, b)."""
    a, b = np.asarray(first, np.float64)[:, None], np.asarray(second, np.float64)[None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    shared = np.maximum(sides, 0.0).prod(-1)
    area = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
    return shared / np.maximum(area - shared, 1e-12)


def layout_similarity(first: Array, second: Array) -> float:
    """Sum of IoU over the best one-to-one matching of boxes (Hungarian), over the larger number of boxes; in [0, 1]."""
    overlap = box_overlap(first, second)
    rows, columns = linear_sum_assignment(overlap, maximize=True)
    return float(overlap[rows, columns].sum() / max(overlap.shape))


def layout_diversity(layouts: Sequence[Array]) -> float:
    """SDI of one prompt: 1 - mean pairwise layout similarity of its images' boxes (each (k, 4), k >= 1), in [0, 1]."""
    pairs = list(itertools.combinations(layouts, 2))
    if not pairs:
        raise ValueError("a layout's diversity needs two images")
    return 1.0 - sum(layout_similarity(a, b) for a, b in pairs) / len(pairs)


def left_out(units: int, groups: int = GROUPS) -> Array:
    """Which of U units stay when each of G groups of them is left out: bool (G, U). The same for the same arguments."""
    size = -(-units // groups)  # the least with no more groups than that
    group = np.arange(units) % -(-units // size)
    return group[None] != np.arange(group.max() + 1)[:, None]


def deviations(value: float, replicates: Array, kept: Array) -> Array:
    """Of a metric's values without each group, (G,), `kept` as in `left_out`: deviations whose mean square is the
    squared standard error of the metric over samples of as many units."""
    h = kept.shape[1] / (~kept).sum(1)
    pseudo = h * value - (h - 1) * replicates
    return (pseudo - pseudo.mean()) / np.sqrt(h - 1)


def error_of(deviation: Array) -> float:
    """The standard error that `deviations` stand for."""
    return float(np.sqrt(np.square(deviation).mean()))


@dataclass(frozen=True)
class Interval:
    """A confidence interval with its level, 0.95."""

    low: float
    high: float


def interval(value: float, deviation: Array) -> Interval | None:
    """The metric's interval from its `deviations` (G,), by Student's t; None without any, or if some has no value."""
    if len(deviation) == 0 or not np.isfinite(deviation).all():
        return None
    half = critical(len(deviation)) * error_of(deviation)
    return Interval(value - half, value + half)


@dataclass(frozen=True)
class Difference:
    """`change` = second less first, its interval, and the two-sided p-value of no difference (Student's t)."""

    change: float
    interval: Interval
    p: float
    paired: bool


def difference(first: float, second: float, ours: Array, other: Array, paired: bool) -> Difference | None:
    """Whether two scores differ, from the `deviations` of the first and of the second.

    `paired`: both were computed on the same prompts, so that what the prompts have in common cancels; else the two are
    taken as independent. None where one of them has no interval.
    """
    if len(ours) == 0 or len(other) == 0:
        return None
    paired = paired and len(ours) == len(other)
    change, count = second - first, min(len(ours), len(other))
    spread = error_of(other - ours) if paired else float(np.hypot(error_of(ours), error_of(other)))
    if not np.isfinite(spread):
        return None
    half = critical(count) * spread
    return Difference(change, Interval(change - half, change + half), chance(change, spread, count), paired)
