"""The point of a convex hull that is nearest to the origin, from the points' Gram matrix alone.

symbol   name here   meaning
P        -           K points, never needed themselves
H        gram        (K, K) = P P^T
alpha    weights     (K,) on the simplex: alpha >= 0, sum 1
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]

# Of all minimisers (duplicated or dependent points have many) the one of smallest norm, in the limit: a ridge on the
# Gram matrix, relative to its largest diagonal entry, makes the problem strictly convex, so that the answer is one, the
# same in any order of the points. It moves the conditions of optimality by no more than itself.
RIDGE = 1e-9


def min_norm_weights(gram: Array) -> Array:
    """argmin over the simplex of `alpha^T gram alpha`, exactly, by non-negative least squares (an active-set method).

    With `gram = R^T R` the least-squares problem `R a = 0, sum a = 1` in `a >= 0` has its solution on the ray of alpha.
    The conditions of optimality, `gram alpha >= alpha^T gram alpha` with equality where alpha > 0, hold to `2 RIDGE` of
    the largest diagonal entry, for singular, opposed and duplicated points too.

    Args:
        gram: (K, K), symmetric, positive semidefinite, finite, K >= 1.

    Returns:
        (K,) weights, not negative, sum 1. A permutation of the points permutes them.
    """
    scale = float(np.diag(gram).max())
    if scale <= 0:  # all points are the origin
        return np.full(len(gram), 1 / len(gram))
    root = np.linalg.cholesky(gram / scale + RIDGE * np.eye(len(gram))).T
    weights, _ = nnls(np.vstack([root, np.ones(len(gram))]), np.append(np.zeros(len(gram)), 1.0))
    return weights / weights.sum()


def residual(gram: Array, weights: Array) -> float:
    """How far `weights` are from optimal, relative to the largest diagonal entry: 0 for the exact minimiser."""
    slope = gram @ weights / float(np.diag(gram).max())
    value = float(weights @ slope)
    on_support = np.abs(slope - value)[weights > 0].max()
    return max(value - float(slope.min()), float(on_support))
