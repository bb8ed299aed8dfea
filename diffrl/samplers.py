"""One function per solver step, and the Gaussian log-probability of the stochastic ones.

Symbols, as in the papers (shapes):

    x, x_next   latent before and after the step                        (B, C, h, w)
    x0, eps, v  the network's clean latent, noise and velocity at x, t  (B, C, h, w)
    t, t_next   sigmas of the path, 0 <= t_next < t <= 1, float         (B,); dt = t_next - t < 0
    a, eta      the noise level: strength of the fresh noise, >= 0      a float, or (B,) one for each row
    mean, std   of the Gaussian that x_next is drawn from               (B, C, h, w), (B, 1, 1, 1)

A stochastic step returns (mean, std); `x_next = mean + std * noise`. Training re-evaluates the very same function, so
that on the first pass the importance ratio is one. No function here synchronises with the host.

The last step (t_next = 0): `flow_sde` and `dance` keep its noise, as published; their std is positive whenever t is.
The std of `cps`, `renoise` and `ddim` is proportional to sigma at t_next and so zero there: that step is deterministic
and has no log-probability, and a rollout never counts it among the stochastic steps (`Sampler.quiet_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.forward import FlowMatching, Prediction, Process, expand
from diffrl.sampling import SAMPLERS, SamplerSpec, find_sampler
from diffrl.seeds import generator

NoiseLevel = float | Tensor  # one for all rows, or (B,)
DpmState = tuple[Tensor, Tensor]  # the previous step's log-SNR / 2 (B,) and its x0


def euler_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor) -> Tensor:
    """Euler's step of the flow ODE dx = v dt."""
    return x + expand(t_next - t, x) * v


def dpm2_step(
    x: Tensor, x0: Tensor, t: Tensor, t_next: Tensor, state: DpmState | None, process: Process
) -> tuple[Tensor, DpmState]:
    """DPM-Solver++(2M), midpoint form (Lu et al. 2211.01095, algorithm 2).

    The correction needs a finite log-SNR at three points, so the first step (`state` None), the one after a start at
    pure noise and the one that ends at t_next = 0 are first order, as in diffusers' `DPMSolverMultistepScheduler`.
    """
    alpha, sigma = process.alpha(t), process.sigma(t)
    alpha_next, sigma_next = process.alpha(t_next), process.sigma(t_next)
    lam, lam_next = alpha.log() - sigma.log(), alpha_next.log() - sigma_next.log()
    d = x0
    if state is not None:
        lam_prev, x0_prev = state
        # 1 / r: +-inf or nan where a log-SNR is infinite (t_next = 0), 0 after a start at pure noise.
        inv_r = torch.nan_to_num((lam_next - lam) / (lam - lam_prev), nan=0.0, posinf=0.0, neginf=0.0)
        d = x0 + expand(inv_r / 2, x) * (x0 - x0_prev)
    # alpha_next (1 - exp(-h)), with exp(-h) = (alpha / sigma) (sigma_next / alpha_next) and no infinity
    weight = alpha_next - alpha * sigma_next / sigma
    return expand(sigma_next / sigma, x) * x + expand(weight, x) * d, (lam, x0)


def flow_sde(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, a: NoiseLevel, t_second: float) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's SDE with the ODE's marginals (2505.05470, eq. 9), s = a sqrt(t / (1 - t)).

    `t_second` is the schedule's second sigma; it stands in for t in 1 - t where t = 1.
    """
    s = a * (t / (1 - torch.where(t >= 1, t_second, t))).sqrt()
    return _sde(x, v, t, t_next, s)


def dance(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, a: NoiseLevel) -> tuple[Tensor, Tensor]:
    """DanceGRPO's SDE (2505.07818): the same drift correction with a constant noise level, s = a."""
    return _sde(x, v, t, t_next, a if isinstance(a, Tensor) else torch.full_like(t, a))


def _sde(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Euler-Maruyama of dx = [v + s^2/(2t) (x + (1 - t) v)] dt + s dw; x + (1 - t) v is the predicted noise."""
    dt = t_next - t
    k = s**2 / (2 * t)
    mean = x * expand(1 + k * dt, x) + v * expand((1 + k * (1 - t)) * dt, x)
    return mean, expand(s * (-dt).sqrt(), x)


def cps(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, a: NoiseLevel) -> tuple[Tensor, Tensor]:
    """Coefficients-preserving sampling (Flow-CPS, 2509.05952), a in [0, 1]: a share sin(a pi/2) of the noise is fresh.

    The total noise keeps the coefficient t_next, so an exact x0 prediction gives exact marginals in any number of
    steps. The fresh share is per step: against the posterior *mean* (what a network predicts) many steps at a fixed a
    shrink the variance, and the marginals are the ODE's only as a goes to 0 (a^2 proportional to the step).
    """
    x0, eps = x - expand(t, x) * v, x + expand(1 - t, x) * v
    tn, angle = expand(t_next, x), a * math.pi / 2
    if isinstance(angle, Tensor):
        return (1 - tn) * x0 + tn * expand(angle.cos(), x) * eps, tn * expand(angle.sin(), x)
    return (1 - tn) * x0 + tn * math.cos(angle) * eps, tn * math.sin(angle)


def renoise(x0: Tensor, eps: Tensor, process: Process, t_next: Tensor, a: NoiseLevel) -> tuple[Tensor, Tensor]:
    """Predict the clean latent and noise it again, a share a in [0, 1] of the noise fresh; for any Gaussian process.

    a = 1 is the step of consistency models and of RLCM (2404.03673): N(alpha' x0, sigma'^2); for flow matching it is
    `cps` with a = 1. a = 0 is DDIM without noise.
    """
    fresh = torch.as_tensor(a, dtype=t_next.dtype, device=t_next.device).expand_as(t_next)
    sigma = process.sigma(t_next)
    old = sigma * (1 - fresh**2).sqrt()
    return expand(process.alpha(t_next), x0) * x0 + expand(old, x0) * eps, expand(sigma * fresh, x0)


def ddim(
    x0: Tensor, eps: Tensor, process: Process, t: Tensor, t_next: Tensor, eta: NoiseLevel
) -> tuple[Tensor, Tensor]:
    """DDIM (2010.02502, eq. 12 and 16) for any Gaussian process, eta in [0, 1]; eta = 1 is DDPM's posterior."""
    alpha, sigma = process.alpha(t), process.sigma(t)
    alpha_next, sigma_next = process.alpha(t_next), process.sigma(t_next)
    # variance of x_next given x and x0: sigma_next^2 / sigma^2 (sigma^2 - (alpha / alpha_next)^2 sigma_next^2)
    scale = (alpha / alpha_next * sigma_next / sigma).clamp(max=1)
    std = eta * sigma_next * (1 - scale**2).sqrt()
    old = (sigma_next**2 - std**2).clamp(min=0).sqrt()
    return expand(alpha_next, x0) * x0 + expand(old, x0) * eps, expand(std, x0)


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """log N(x_next; mean, std^2), *averaged* over the latent dimensions (Flow-GRPO's convention): (B,).

    `std` (B, 1, 1, 1) must be positive.
    """
    z = (x_next - mean) / std
    constant = std.flatten(1)[:, 0].log() + 0.5 * math.log(2 * math.pi)
    return -0.5 * z.square().flatten(1).mean(1) - constant


# The steps in the two forms of `diffrl.sampling.Sampler`, where the facts of each sampler are.
STEPS: dict[str, Callable[..., Any]] = {
    "euler": lambda x, p, t, tn, state, process: (euler_step(x, p.v, t, tn), state),
    "dpm2": lambda x, p, t, tn, state, process: dpm2_step(x, p.x0, t, tn, state, process),
    "flow_sde": lambda x, p, t, tn, a, t2, process: flow_sde(x, p.v, t, tn, a, t2),
    "dance": lambda x, p, t, tn, a, t2, process: dance(x, p.v, t, tn, a),
    "cps": lambda x, p, t, tn, a, t2, process: cps(x, p.v, t, tn, a),
    "ddim": lambda x, p, t, tn, a, t2, process: ddim(p.x0, p.eps, process, t, tn, a),
    "renoise": lambda x, p, t, tn, a, t2, process: renoise(p.x0, p.eps, process, tn, a),
}


def _step(name: str) -> Callable[..., Any]:
    return find_sampler(name).step or STEPS[name]


def check_process(name: str, process: Process) -> None:
    """UserError if the sampler called `name` is not defined for `process`, naming one that is."""
    facts = find_sampler(name)
    if facts.flow_only and not isinstance(process, FlowMatching):
        fit = [n for n, other in SAMPLERS.items() if other.stochastic == facts.stochastic and not other.flow_only]
        raise UserError(f'rollout.sampler: "{name}" is not defined for a {type(process).__name__} model; use {fit[0]}')


class Scheduled(Protocol):
    """What `schedule` asks of a policy."""

    process: Process

    def timesteps(self, steps: int) -> Tensor:
        """(steps + 1,) noise levels of the model's own schedule."""


def schedule(policy: Scheduled, spec: SamplerSpec) -> Tensor:
    """Noise levels (S + 1,) on the CPU, noisiest first, the last 0: the model's own, or evenly spaced and then shifted.

    Raises:
        UserError: `spec.shift` for a model whose levels are those of a training grid.
    """
    if spec.shift is None:
        return policy.timesteps(spec.steps)
    if not isinstance(policy.process, FlowMatching):
        kind = type(policy.process).__name__
        raise UserError(f"rollout.shift: is not defined for a {kind} model, which has a grid of its own; leave it out")
    t = 1 - torch.arange(spec.steps + 1, dtype=torch.float64) / spec.steps
    return (spec.shift * t / (1 + (spec.shift - 1) * t)).float()


def sde_kernel(
    name: str,
    x: Tensor,
    prediction: Prediction,
    t: Tensor,
    t_next: Tensor,
    noise_level: NoiseLevel,
    t_second: float,
    process: Process,
) -> tuple[Tensor, Tensor]:
    """(mean, std) of the stochastic step `name`: what a rollout draws from, and what training re-evaluates.

    `noise_level` is a (flow_sde, dance, cps, renoise) or eta (ddim); it, t and t_next (B,) may differ from row to row.
    """
    return _step(name)(x, prediction, t, t_next, noise_level, t_second, process)


def ode_step(
    name: str, x: Tensor, prediction: Prediction, t: Tensor, t_next: Tensor, state: DpmState | None, process: Process
) -> tuple[Tensor, DpmState | None]:
    """One deterministic step (x_next, state) of sampler `name`; start with state None.

    A stochastic sampler's steps without noise (outside its window, at noise level 0, or the last one of cps and ddim)
    are Euler's, which for flow matching is DDIM with eta = 0; for a variance preserving process DDIM with eta = 0.
    """
    if find_sampler(name).stochastic:
        if isinstance(process, FlowMatching):
            return euler_step(x, prediction.v, t, t_next), state
        return process.add_noise(prediction.x0, prediction.eps, t_next), state
    return _step(name)(x, prediction, t, t_next, state, process)


def window_steps(spec: SamplerSpec, seed: int, epoch: int | str) -> range:
    """The steps (0 is the noisiest) that draw fresh noise in this epoch; the same everywhere."""
    first, end = spec.window_range or (0, spec.noisy_steps)
    last = end - spec.stochastic_steps
    if spec.window_move is not None:
        every, stride = spec.window_move
        stops = -(-(last - first) // stride) + 1
        moved = (epoch if isinstance(epoch, int) else 0) // every % stops
        start = min(first + moved * stride, last)
    elif spec.window_range is not None:
        start = int(torch.randint(first, last + 1, (1,), generator=generator(seed, epoch, "window")))
    else:
        start = 0
    return range(start, start + spec.stochastic_steps)


def one_step(x_t: Tensor, prediction: Prediction, t: Tensor, t_next: Tensor, eps: Tensor, process: Process) -> Tensor:
    """x0^ (B, C, h, w): one ODE step of the prediction, down or up, then the known noise taken out.

    With a perfect prediction it is x0. An error d of the velocity enters as `(t_next - t) / alpha(t_next) d`, so that
    only the error of one step, not of the whole way to t = 0, moves the image.
    """
    x_next, _ = ode_step("ddim", x_t, prediction, t, t_next, None, process)  # deterministic: Euler's for flow matching
    return (x_next - expand(process.sigma(t_next), x_t) * eps) / expand(process.alpha(t_next), x_t)
