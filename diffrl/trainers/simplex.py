"""The point of a convex hull that is nearest to the origin, from the points' Gram matrix alone.

symbol   name here   meaning
P        -           K points, never needed themselves
H        gram        (K, K) = P P^T
alpha    weights     (K,) on the simplex: alpha >= 0, sum 1
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Of all minimisers (duplicated or dependent points have many) the one of smallest norm, in the limit: a ridge on the
# Gram matrix, relative to its largest diagonal entry, makes the problem strictly convex, so that the answer is one, the
# same in any order of the points. It moves the conditions of optimality by no more than itself.
RIDGE = 1e-9
_TOLERANCE = 1e-12
_MOST_ROUNDS = 1000  # against a circle of rounding errors; a tenth of K are needed


def min_norm_weights(gram: Array) -> Array:
    """argmin over the simplex of `alpha^T gram alpha`, exactly, by Wolfe's active-set algorithm.

    P. Wolfe, Finding the nearest point in a polytope, Mathematical Programming 11 (1976). The conditions of
    optimality, `gram alpha >= alpha^T gram alpha` with equality where alpha > 0, hold to `2 RIDGE` of the largest
    diagonal entry, for singular, opposed and duplicated points too.

    Args:
        gram: (K, K), symmetric, positive semidefinite, finite, K >= 1.

    Returns:
        (K,) weights, not negative, sum 1. A permutation of the points permutes them.
    """
    scale = float(np.diag(gram).max())
    if scale <= 0:  # all points are the origin
        return np.full(len(gram), 1 / len(gram))
    h = gram / scale + RIDGE * np.eye(len(gram))
    support = np.arange(len(gram))
    weights = _minimise_on(h, np.full(len(gram), 1 / len(gram)), support)
    for _ in range(_MOST_ROUNDS):
        slope = h @ weights
        entering = int(slope.argmin())
        if slope[entering] >= float(weights @ slope) - _TOLERANCE or weights[entering] > 0:
            break
        weights = _minimise_on(h, weights, np.append(np.flatnonzero(weights), entering))
    return weights / weights.sum()


def _minimise_on(h: Array, weights: Array, support: NDArray[np.intp]) -> Array:
    """The minimiser on the affine hull of the `support`, dropping the points whose weight would be negative there."""
    current = weights[support]
    while True:
        # The point of the affine hull that is nearest to the origin: H a is proportional to ones.
        best = np.linalg.solve(h[np.ix_(support, support)], np.ones(len(support)))
        best /= best.sum()
        falling = best <= 0
        if not falling.any():
            break
        steps = np.where(falling, current / np.where(falling, current - best, 1.0), np.inf)
        current = current + float(steps.min()) * (best - current)
        current[int(steps.argmin())] = 0.0
        support, current = support[current > 0], current[current > 0]
    result = np.zeros_like(weights)
    result[support] = best
    return result


def residual(gram: Array, weights: Array) -> float:
    """How far `weights` are from optimal, relative to the largest diagonal entry: 0 for the exact minimiser."""
    slope = gram @ weights / float(np.diag(gram).max())
    value = float(weights @ slope)
    on_support = np.abs(slope - value)[weights > 0].max()
    return max(value - float(slope.min()), float(on_support))
