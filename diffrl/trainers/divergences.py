"""Other forms of the penalty, as functions of the KL divergence of two Gaussians with one standard deviation.

With d = |difference of the means| / std the KL is d^2 / 2 (per latent dimension, as everywhere here), and every
f-divergence is a function of d, so of the KL:

    chi-squared       exp(d^2) - 1 = exp(2 KL) - 1          grows without bound: holds back what has gone far
    Jensen-Shannon    log 2 - E softplus(-d (d/2 + z))      at most log 2: lets go what has gone far; z standard normal

Near 0 they are 2 KL and KL / 4. For the forward process, whose penalty is mean (v_theta - v_ref)^2, that is the KL.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
from torch import Tensor
from torch.nn.functional import softplus

Form = Literal["kl", "chi2", "js"]


@lru_cache(maxsize=1)
def _nodes() -> tuple[list[float], list[float]]:
    """Gauss-Hermite nodes and weights of a standard normal."""
    z, weight = np.polynomial.hermite_e.hermegauss(64)
    return z.tolist(), (weight / math.sqrt(2 * math.pi)).tolist()


def shaped(kl: Tensor, form: Form) -> Tensor:
    """(b,) the divergence of this form from KL (b,), differentiable, also at 0."""
    if form == "chi2":
        return (2 * kl).expm1()
    if form == "js":
        z, weight = (kl.new_tensor(values) for values in _nodes())
        d = (2 * kl + 1e-12).sqrt()[:, None]  # the root's slope at 0 is infinite
        return math.log(2) - (softplus(-d * (d / 2 + z)) * weight).sum(1)
    return kl
