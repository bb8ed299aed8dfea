"""What the clip of the ratio and the mask on the divergence stop, in closed form: the table of the notebook.

At a divergence D of a step with n latent dimensions (both means over them), moved in a direction that has nothing to do
with the noise, log r is normal with the mean -D and the variance 2 D / n; with it the total variation of the two steps.
"""

from __future__ import annotations

import math
from statistics import NormalDist

DIVERGENCES = (1e-7, 1e-6, 1e-5, 3e-5, 1e-4)


def stopped(divergence: float, dims: int, clip: float = 0.0) -> tuple[float, float]:
    """Shares of rows with A > 0 and with A < 0 whose ratio lies beyond the clip on the side that they are pushed to.

    Without a clip those that are pushed outward at all, as the mask stops them beyond delta.
    """
    ratio = NormalDist(-divergence, math.sqrt(2 * divergence / dims))
    return 1 - ratio.cdf(math.log(1 + clip)), ratio.cdf(math.log(1 - clip))


def table(dims: str, clip: str) -> str:
    """A row for each divergence."""
    n, e = int(dims), float(clip)
    sides = "A > 0", "A < 0"
    kinds = f"clip {e:g} stops", "mask beyond delta"
    heads = ["D", "TV of a step", *(f"{kind}, {side}" for kind in kinds for side in sides)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for divergence in DIVERGENCES:
        variation = 2 * NormalDist().cdf(math.sqrt(2 * n * divergence) / 2) - 1
        shares = (*stopped(divergence, n, e), *stopped(divergence, n))
        lines.append(f"| {divergence:g} | {variation:.3f} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    return "\n".join(lines) + "\n"
