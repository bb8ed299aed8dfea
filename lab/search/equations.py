"""The equations of test-time search, as free functions of plain tensors.

symbol     name here     meaning
x_t        x             latents on the way, (B, C, h, w)
r          value         what is searched for: the weighted sum of the rewards, (..., K) of K particles
lambda     1 / temperature
b          MIX           share of fresh noise in a child of a start noise: x' = sqrt(1 - b^2) x + b eps
s_g        std           what the SDE adds in the step from x_t: x' = x + s_g eps
w          strength      of the reward against the model: the target is p(x) exp(w r(x))

Feynman-Kac steering: Singhal et al. 2501.06848. EvoSearch: He et al. 2505.17618. Flow-NRG: Liu et al. 2501.13918.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffrl.forward import Prediction, Process, expand

MIX = 0.2  # EvoSearch's b
TOURNAMENT = 0.9  # share of the population that meets in a tournament, as in EvoSearch's code


def log_potential(value: Tensor, before: Tensor, temperature: float | Tensor) -> Tensor:
    """log G_t = (r(x_t) - r(x_{t+1})) / temperature, the "difference" potential of 2501.06848: the product over all
    steps is exp(r(x_0) / temperature), whatever the estimates on the way were. Shape of `value`."""
    return (value - before) / temperature


def effective_size(log_weights: Tensor) -> Tensor:
    """(...,) of log weights (..., K): 1 / sum w^2 of the normalised weights, from 1 (one counts) to K (all alike)."""
    return 1 / log_weights.softmax(-1).square().sum(-1)


def systematic(log_weights: Tensor, u: float) -> Tensor:
    """(K,) int64 ancestors by systematic resampling with one draw u in (0, 1) from log weights (K,).

    The paper draws them independently (multinomial); this has the same means at a lower variance, each particle having
    floor(K w) or ceil(K w) children: of equal weights every particle goes on as it is.
    """
    count = len(log_weights)
    edges = log_weights.double().softmax(0).cumsum(0) * count
    places = torch.arange(count, dtype=torch.float64) + u
    return torch.searchsorted(edges, places, right=True).clamp(max=count - 1)


def mixed_noise(x: Tensor, eps: Tensor, b: float = MIX) -> Tensor:
    """A child of a start noise, sqrt(1 - b^2) x + b eps: Gaussian again (EvoSearch, eq. 6)."""
    return (1 - b**2) ** 0.5 * x + b * eps


def mutated(x: Tensor, eps: Tensor, std: Tensor | float) -> Tensor:
    """A child of a state on the way, x + s_g eps (EvoSearch, eq. 7)."""
    return x + std * eps


def tournament(value: Tensor, draws: Tensor) -> Tensor:
    """(c,) int64: the best of each of c tournaments among n members, from value (n,) and draws (c, n) in [0, 1].

    The members with the `TOURNAMENT` n lowest draws of a row meet in it.
    """
    count = value.shape[0]
    meet = draws.argsort(1)[:, : max(round(TOURNAMENT * count), 1)]
    return meet.gather(1, value[meet].argmax(1, keepdim=True))[:, 0]


def reward_gradient(
    x: Tensor, prediction: Prediction, gradient: Tensor, t: Tensor, w: float, process: Process
) -> Prediction:
    """Flow-NRG: v~ = v - w t / (1 - t) grad_{x_t} r, written for any Gaussian process as eps~ = eps - w sigma grad.

    gradient (B, C, h, w): of r at the clean prediction x0^. grad_{x_t} r is (dx0^/dx_t)^T of it; the network's Jacobian
    is taken as that of Gaussian data of unit variance, alpha / (alpha^2 + sigma^2), so that no backward pass through
    the network is needed. For such data and a linear reward p exp(w r) is met exactly; at t = 1 it is finite,
    where the paper leaves the step out.
    """
    alpha, sigma = expand(process.alpha(t), x), expand(process.sigma(t), x)
    share = sigma / (alpha**2 + sigma**2)
    # eps~ = eps - w sigma alpha / (alpha^2 + sigma^2) g; x0 moves by sigma / alpha of that: no division where alpha = 0
    eps = prediction.eps - w * share * alpha * gradient
    x0 = prediction.x0 + w * share * sigma * gradient
    return Prediction(x0=x0, eps=eps, v=process.velocity(x0, eps, t))
