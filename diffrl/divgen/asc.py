"""ASC, the adjusted style coverage of DivGenBench: an image retrieval score made comparable (arXiv 2512.24146).

Symbols: X_train, T real images; X_q, n queries (synthetic, or real and held out). `hits` is the number of distinct
training images that are the nearest neighbour of at least one query.

Its interval comes from the model behind s* itself (parametric bootstrap: uniform draws from s* images), not from
subsets of the prompts: how many different images n queries meet is no mean over queries, and subsets would give an
interval 1.6 times too wide.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.special import psi

from diffrl.divgen.metrics import REPLICATES, Array, unit
from diffrl.seeds import seed_of

_ROWS = 4096  # similarities are computed in blocks of this many queries


def nearest(train: Array, queries: Array) -> Array:
    """Index of the training image with the largest cosine for each query: (T, F), (n, F) -> (n,) int64."""
    bank, e = unit(train).astype(np.float32), unit(queries).astype(np.float32)
    parts = [(e[i : i + _ROWS] @ bank.T).argmax(1) for i in range(0, len(e), _ROWS)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def learnable(queries: int, hits: int, most: int) -> float:
    """s*, the maximum-likelihood number of learnable training images, in [hits, most].

    The likelihood is that of the occupancy distribution, that n uniform draws from s images meet k distinct ones:
    P = s! / (s - k)! * S(n, k) / s^n, with S the Stirling number of the second kind. It has one maximum, where
    psi(s + 1) - psi(s - k + 1) = n / s: it is found by Brent's method. If every query hit another image (k = n) it
    rises for ever; then, and where the maximum lies above, s* is `most` = |X_train|.

    Raises ValueError unless 1 <= hits <= min(queries, most).
    """
    if not 1 <= hits <= min(queries, most):
        raise ValueError(f"{hits} distinct images of {most} cannot come from {queries} queries")

    def slope(s: float) -> float:
        return float(psi(s + 1) - psi(s - hits + 1) - queries / s)

    if hits == most or slope(hits) <= 0:
        return float(hits)
    return float(most) if slope(most) >= 0 else float(brentq(slope, hits, most, xtol=1e-9 * most))


def draws(learned: float, queries: int, seed: int, replicates: int = REPLICATES) -> Array:
    """Distinct images met by `queries` uniform draws from `learned` images (rounded), simulated: (R,) int64."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.integers(max(round(learned), 1), size=(replicates, queries)), axis=1)
    return 1 + (np.diff(rows, axis=1) > 0).sum(1)


def coverage(synthetic: Array, real: Array, size: int) -> tuple[float, Array]:
    """ASC = IRS(X_syn) / IRS(X_test), and its deviations (R,) for an interval.

    0 is a single image over and over, 1 covers the training images as real ones do. synthetic, real: nearest training
    images (n,) among `size`, of equally many queries (else ValueError). The real queries' draws are the same for every
    model, as their images are; the synthetic ones' are each model's own.
    """
    n = len(synthetic)
    if n != len(real):
        raise ValueError(f"{n} synthetic and {len(real)} real queries: take equally many")
    learned = [learnable(n, len(np.unique(neighbours)), size) for neighbours in (synthetic, real)]
    drawing_seed = seed_of("asc", *np.bincount(synthetic, minlength=1).tolist())
    redrawn = []
    for s, seed in zip(learned, (drawing_seed, seed_of("asc", n)), strict=True):
        hits, place = np.unique(draws(s, n, seed), return_inverse=True)
        redrawn.append(np.array([learnable(n, int(k), size) for k in hits])[place])
    ratio = redrawn[0] / redrawn[1]
    return learned[0] / learned[1], ratio - ratio.mean()
