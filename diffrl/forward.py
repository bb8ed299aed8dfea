"""The forward process: how a clean latent is noised, and how one model output gives x0, noise and velocity.

Symbols (shapes): x0, eps, x_t, v (B, C, h, w); t (B,) float in [0, 1], 0 is clean, 1 the noisiest.

    x_t = alpha_t x0 + sigma_t eps

Flow matching (Lipman et al. 2210.02747; rectified flow 2209.03003): alpha = 1 - t, sigma = t, v = eps - x0.
Variance preserving (DDPM 2006.11239): alpha^2 + sigma^2 = 1, v = alpha eps - sigma x0 (Salimans & Ho 2202.00512).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Prediction:
    """What a network says about x_t, in all three forms, each (B, C, h, w): clean latent, noise and velocity."""

    x0: Tensor
    eps: Tensor
    v: Tensor


def expand(t: Tensor, like: Tensor) -> Tensor:
    """A per-sample value (B,) as (B, 1, ..., 1), to be broadcast against `like` (B, ...)."""
    return t.view(-1, *[1] * (like.ndim - 1))


class Process(ABC):
    """A Gaussian forward process x_t = alpha_t x0 + sigma_t eps."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Coefficient of the clean latent at t (B,) in [0, 1]; shape of t."""

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """Coefficient of the noise at t (B,) in [0, 1]; shape of t."""

    @abstractmethod
    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """The velocity that belongs to x0 and eps at t; shape of x0."""

    @abstractmethod
    def from_velocity(self, x_t: Tensor, v: Tensor, t: Tensor) -> Prediction:
        """All three forms from a velocity; finite for every t in [0, 1]."""

    def add_noise(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = alpha_t x0 + sigma_t eps, with t (B,)."""
        return expand(self.alpha(t), x0) * x0 + expand(self.sigma(t), x0) * eps

    def from_x0(self, x_t: Tensor, x0: Tensor, t: Tensor) -> Prediction:
        """All three forms from a clean prediction; needs sigma_t > 0 (t > 0), where the noise can be told."""
        eps = (x_t - expand(self.alpha(t), x_t) * x0) / expand(self.sigma(t), x_t)
        return Prediction(x0=x0, eps=eps, v=self.velocity(x0, eps, t))

    def from_eps(self, x_t: Tensor, eps: Tensor, t: Tensor) -> Prediction:
        """All three forms from a noise prediction; needs alpha_t > 0 (at t = 1 noise says nothing about x0)."""
        x0 = (x_t - expand(self.sigma(t), x_t) * eps) / expand(self.alpha(t), x_t)
        return Prediction(x0=x0, eps=eps, v=self.velocity(x0, eps, t))


class FlowMatching(Process):
    """Straight paths from data to noise: alpha = 1 - t, sigma = t, v = d x_t / dt = eps - x0."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return eps - x0

    def from_velocity(self, x_t: Tensor, v: Tensor, t: Tensor) -> Prediction:
        t = expand(t, x_t)
        return Prediction(x0=x_t - t * v, eps=x_t + (1 - t) * v, v=v)


class VariancePreserving(Process):
    """DDPM-type noising on a training grid of T steps, for continuous t.

    Grid step k (0 ... T-1) is t = (k + 1) / T, so t = 0 is the clean latent itself. Between grid points
    alpha = sqrt(alphas_cumprod) is interpolated linearly: unlike the log-SNR it is finite at both ends (t = 0, and
    t = 1 under a zero-terminal-SNR schedule), and sigma = sqrt(1 - alpha^2) keeps the variance at every t.

    Args:
        alphas_cumprod: (T,) cumulative product of 1 - beta, decreasing, in [0, 1] (diffusers' name).
    """

    def __init__(self, alphas_cumprod: Tensor) -> None:
        if alphas_cumprod.ndim != 1 or alphas_cumprod.min() < 0 or alphas_cumprod.max() > 1:
            raise ValueError("alphas_cumprod must be one-dimensional with values in [0, 1]")
        alpha = alphas_cumprod.detach().cpu().double().sqrt()
        # 1 - alpha is stored, not alpha: sigma^2 = (1 - alpha)(1 + alpha) then keeps its digits at small t in float32.
        self._one_minus_alpha = torch.cat([alpha.new_zeros(1), 1 - alpha])
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.steps = len(alphas_cumprod)

    def index(self, t: Tensor) -> Tensor:
        """The training grid's (fractional) step of t, what an eps- or v-predicting UNet is called with; -1 is clean."""
        return t * self.steps - 1

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - self._interpolate(t)

    def sigma(self, t: Tensor) -> Tensor:
        m = self._interpolate(t)
        return (m * (2 - m)).sqrt()

    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return expand(self.alpha(t), x0) * eps - expand(self.sigma(t), x0) * x0

    def from_velocity(self, x_t: Tensor, v: Tensor, t: Tensor) -> Prediction:
        alpha, sigma = expand(self.alpha(t), x_t), expand(self.sigma(t), x_t)
        return Prediction(x0=alpha * x_t - sigma * v, eps=sigma * x_t + alpha * v, v=v)

    def _interpolate(self, t: Tensor) -> Tensor:
        """1 - alpha at t, linear between the grid points."""
        key = (t.device, t.dtype)
        if key not in self._tables:
            self._tables[key] = self._one_minus_alpha.to(t.dtype).to(t.device)  # MPS has no float64
        table = self._tables[key]
        position = (t * self.steps).clamp(0, self.steps)
        left = position.floor().clamp(max=self.steps - 1)
        index = left.long()
        return torch.lerp(table[index], table[index + 1], position - left)
