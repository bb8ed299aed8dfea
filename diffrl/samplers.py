"""One function per solver step, and the Gaussian log-probability of the stochastic ones.

Symbols, as in the papers (shapes):

    x, x_next   latent before and after the step                        (B, C, h, w)
    x0, eps, v  the network's clean latent, noise and velocity at x, t  (B, C, h, w)
    t, t_next   noise levels, 0 <= t_next < t <= 1, float               (B,); dt = t_next - t < 0
    a, eta      strength of the fresh noise, >= 0                       a float, or (B,) one for each row
    mean, std   of the Gaussian that x_next is drawn from               (B, C, h, w), (B, 1, 1, 1)

A stochastic step returns (mean, std); `x_next = mean + std * noise`. Training re-evaluates the very same function, so
that on the first pass the importance ratio is one. No function here synchronises with the host.

The last step (t_next = 0): `flow_sde` and `dance` keep its noise, as published; their std is positive whenever t is.
The std of `cps`, `renoise` and `ddim` is proportional to sigma at t_next and so zero there: that step is deterministic
and has no log-probability, and a rollout never counts it among the stochastic steps (`SamplerInfo.noisy_last`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from diffrl.errors import UserError, nearest
from diffrl.forward import FlowMatching, Prediction, Process, VariancePreserving, expand
from diffrl.seeds import generator

Level = float | Tensor  # of the noise: one for all rows, or (B,)
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


def flow_sde(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, a: Level, t_second: float) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's SDE with the ODE's marginals (2505.05470, eq. 9), s = a sqrt(t / (1 - t)).

    `t_second` is the schedule's second noise level; it stands in for t in 1 - t where t = 1.
    """
    s = a * (t / (1 - torch.where(t >= 1, t_second, t))).sqrt()
    return _sde(x, v, t, t_next, s)


def dance(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, a: Level) -> tuple[Tensor, Tensor]:
    """DanceGRPO's SDE (2505.07818): the same drift correction with a constant noise level, s = a."""
    return _sde(x, v, t, t_next, a if isinstance(a, Tensor) else torch.full_like(t, a))


def _sde(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Euler-Maruyama of dx = [v + s^2/(2t) (x + (1 - t) v)] dt + s dw; x + (1 - t) v is the predicted noise."""
    dt = t_next - t
    k = s**2 / (2 * t)
    mean = x * expand(1 + k * dt, x) + v * expand((1 + k * (1 - t)) * dt, x)
    return mean, expand(s * (-dt).sqrt(), x)


def cps(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, a: Level) -> tuple[Tensor, Tensor]:
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


def renoise(x0: Tensor, eps: Tensor, process: Process, t_next: Tensor, a: Level) -> tuple[Tensor, Tensor]:
    """Predict the clean latent and noise it again, a share a in [0, 1] of the noise fresh; for any Gaussian process.

    a = 1 is the step of consistency models and of RLCM (2404.03673): N(alpha' x0, sigma'^2); for flow matching it is
    `cps` with a = 1. a = 0 is DDIM without noise.
    """
    fresh = torch.as_tensor(a, dtype=t_next.dtype, device=t_next.device).expand_as(t_next)
    sigma = process.sigma(t_next)
    old = sigma * (1 - fresh**2).sqrt()
    return expand(process.alpha(t_next), x0) * x0 + expand(old, x0) * eps, expand(sigma * fresh, x0)


def ddim(x0: Tensor, eps: Tensor, process: Process, t: Tensor, t_next: Tensor, eta: Level) -> tuple[Tensor, Tensor]:
    """DDIM (2010.02502, eq. 12 and 16) for any Gaussian process, eta in [0, 1]; eta = 1 is DDPM's posterior."""
    alpha, sigma = process.alpha(t), process.sigma(t)
    alpha_next, sigma_next = process.alpha(t_next), process.sigma(t_next)
    # variance of x_next given x and x0: sigma_next^2 / sigma^2 (sigma^2 - (alpha / alpha_next)^2 sigma_next^2)
    kept = (alpha / alpha_next * sigma_next / sigma).clamp(max=1)
    std = eta * sigma_next * (1 - kept**2).sqrt()
    old = (sigma_next**2 - std**2).clamp(min=0).sqrt()
    return expand(alpha_next, x0) * x0 + expand(old, x0) * eps, expand(std, x0)


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """log N(x_next; mean, std^2), *averaged* over the latent dimensions (Flow-GRPO's convention): (B,).

    `std` (B, 1, 1, 1) must be positive.
    """
    z = (x_next - mean) / std
    constant = std.flatten(1)[:, 0].log() + 0.5 * math.log(2 * math.pi)
    return -0.5 * z.square().flatten(1).mean(1) - constant


@dataclass(frozen=True)
class SamplerInfo:
    """One solver: its step in a common form, and the processes that it is defined for.

    `step` is (x, prediction, t, t_next, level, t_second, process) -> (mean, std) when `stochastic`, else
    (x, prediction, t, t_next, state, process) -> (x_next, state). `noisy_last`: std is positive at t_next = 0 too.
    """

    stochastic: bool
    step: Callable[..., Any]
    processes: tuple[type[Process], ...]
    noisy_last: bool = False


_FLOW = (FlowMatching,)
_ANY = (FlowMatching, VariancePreserving)
SAMPLERS: dict[str, SamplerInfo] = {
    "euler": SamplerInfo(False, lambda x, p, t, tn, state, process: (euler_step(x, p.v, t, tn), state), _FLOW),
    "dpm2": SamplerInfo(False, lambda x, p, t, tn, state, process: dpm2_step(x, p.x0, t, tn, state, process), _ANY),
    "flow_sde": SamplerInfo(True, lambda x, p, t, tn, a, t2, process: flow_sde(x, p.v, t, tn, a, t2), _FLOW, True),
    "dance": SamplerInfo(True, lambda x, p, t, tn, a, t2, process: dance(x, p.v, t, tn, a), _FLOW, True),
    "cps": SamplerInfo(True, lambda x, p, t, tn, a, t2, process: cps(x, p.v, t, tn, a), _FLOW),
    "ddim": SamplerInfo(True, lambda x, p, t, tn, a, t2, process: ddim(p.x0, p.eps, process, t, tn, a), _ANY),
    "renoise": SamplerInfo(True, lambda x, p, t, tn, a, t2, process: renoise(p.x0, p.eps, process, tn, a), _ANY),
}


def sampler_info(name: str, process: Process | None = None) -> SamplerInfo:
    """The sampler called `name`; UserError if there is none, or if it is not defined for `process`."""
    if name not in SAMPLERS:
        raise UserError(f'rollout.sampler: unknown sampler "{name}"{nearest(name, SAMPLERS)}')
    info = SAMPLERS[name]
    if process is not None and not isinstance(process, info.processes):
        fit = [n for n, i in SAMPLERS.items() if i.stochastic == info.stochastic and isinstance(process, i.processes)]
        raise UserError(f'rollout.sampler: "{name}" is not defined for a {type(process).__name__} model; use {fit[0]}')
    return info


def sde_kernel(
    name: str,
    x: Tensor,
    prediction: Prediction,
    t: Tensor,
    t_next: Tensor,
    level: Level,
    t_second: float,
    process: Process,
) -> tuple[Tensor, Tensor]:
    """(mean, std) of the stochastic step `name`: what a rollout draws from, and what training re-evaluates.

    `level` is a (flow_sde, dance, cps, renoise) or eta (ddim); t, t_next and a level (B,) may differ from row to row.
    """
    return SAMPLERS[name].step(x, prediction, t, t_next, level, t_second, process)


def ode_step(
    name: str, x: Tensor, prediction: Prediction, t: Tensor, t_next: Tensor, state: DpmState | None, process: Process
) -> tuple[Tensor, DpmState | None]:
    """One deterministic step (x_next, state) of sampler `name`; start with state None.

    A stochastic sampler's steps without noise (outside its window, at level 0, or the last one of cps and ddim) are
    Euler's, which for flow matching is DDIM with eta = 0; for a variance preserving process DDIM with eta = 0.
    """
    if SAMPLERS[name].stochastic:
        if isinstance(process, FlowMatching):
            return euler_step(x, prediction.v, t, t_next), state
        return process.add_noise(prediction.x0, prediction.eps, t_next), state
    return SAMPLERS[name].step(x, prediction, t, t_next, state, process)


@dataclass(frozen=True)
class SamplerSpec:
    """How to sample; the fields are checked on construction (UserError with the config's key).

    name: one of SAMPLERS. steps: S >= 1. guidance: classifier-free guidance scale, 1 = none. level: noise level a of
    flow_sde, dance, cps and renoise; eta: that of ddim; 0 is deterministic. levels: one for each of the S steps, above
    0, in its place; decay: the level falls from `level` (or eta) at t = 1 to this at t = 0 (`step_levels`). window: w,
    how many consecutive steps are stochastic (MixGRPO 2507.21802, Flow-GRPO-Fast), None = all that can be: S, but S - 1
    for cps, renoise and ddim, whose last step has no noise. window_range: (first, end), the window lies within the
    steps first ... end - 1 and is drawn anew every epoch; None = it starts at step 0, the noisiest. window_move:
    (every, stride), it is not drawn but moves by `stride` steps after so many epochs, and from the end to the start.
    window_by: "group" draws it for each prompt. tail: the steps behind the window are this share of what the schedule
    has, by `tail_solver`, "dpm2" or "euler" (MixGRPO-Flash); None = all of them, Euler's. same_noise: one initial noise
    for all members of a group.
    """

    name: str = "dpm2"
    steps: int = 10
    guidance: float = 1.0
    level: float = 0.7
    window: int | None = None
    window_range: tuple[int, int] | None = None
    same_noise: bool = False
    eta: float = 1.0
    levels: tuple[float, ...] | None = None
    decay: float | None = None
    window_move: tuple[int, int] | None = None
    window_by: Literal["epoch", "group"] = "epoch"
    tail: float | None = None
    tail_solver: Literal["dpm2", "euler"] = "dpm2"

    def __post_init__(self) -> None:
        info = sampler_info(self.name)
        if self.steps < 1:
            raise UserError(f"rollout.steps: {self.steps} is not a number of steps; at least 1")
        if not info.stochastic and (self.window, self.window_range) != (None, None):
            raise UserError(f'rollout.window: the sampler "{self.name}" has no stochastic steps; use flow_sde or cps')
        top = 1.0 if self.name in ("cps", "renoise", "ddim") else math.inf
        for level in (self.strength, *([] if self.decay is None else [self.decay])):
            if not 0 <= level <= top:
                raise UserError(f"rollout.noise_level: {level} is outside [0, {top}], the range of {self.name}")
        if self.levels is not None and len(self.levels) != self.steps:
            raise UserError(
                f"rollout.noise_levels: {len(self.levels)} levels for {self.steps} steps; give one for each"
            )
        if self.levels is not None and not all(0 < level <= top for level in self.levels):
            raise UserError(f"rollout.noise_levels: {list(self.levels)}: each must be above 0 and at most {top}")
        if self.window is not None and not 1 <= self.window <= self.noisy_steps:
            raise UserError(f"rollout.window: {self.window} is outside [1, {self.noisy_steps}] at {self.steps} steps")
        first, end = self.window_range or (0, self.noisy_steps)
        if not (first >= 0 and first + self.width <= end <= self.noisy_steps):
            inside = f"must lie in (0, {self.noisy_steps}) and hold the {self.width} steps of the window"
            raise UserError(f"rollout.window_range: ({first}, {end}) {inside}")
        self._check_window()
        if self.same_noise and self.width == 0:
            raise UserError("rollout.same_noise: without a stochastic step all images of a group would be the same")

    def _check_window(self) -> None:
        if self.window_move is not None:
            every, stride = self.window_move
            if every < 1 or stride < 1:
                raise UserError(f"rollout.window_move: [{every}, {stride}]: both must be at least 1")
            if self.window_by == "group":
                raise UserError('rollout.window_by: "group" draws the window, and rollout.window_move moves it; choose')
        if self.tail is not None:
            if not 0 < self.tail <= 1:
                raise UserError(f"rollout.tail: {self.tail} is not a share of the steps behind the window, in (0, 1]")
            if self.window_by == "group":
                raise UserError('rollout.tail: needs one window for all images, but rollout.window_by is "group"')
            if self.width == 0:
                raise UserError(f'rollout.tail: the sampler "{self.name}" has no window that a tail could follow')

    @property
    def strength(self) -> float:
        """The noise level that this sampler reads: `eta` for ddim, `level` for the others; the highest of `levels`."""
        if self.levels is not None:
            return max(self.levels)
        return self.eta if self.name == "ddim" else self.level

    def step_levels(self, schedule: Sequence[float]) -> list[float] | None:
        """The S noise levels of the steps from `schedule` (S + 1,); None where all are `strength`.

        `decay` is HiCoGen's (2511.19965) cosine from `strength` (eta_max) to eta_min, by the noise level t itself:
        eta(t) = eta_min + (eta_max - eta_min) (1 + cos(pi (1 - t))) / 2.
        """
        if self.levels is not None:
            return list(self.levels)
        if self.decay is None:
            return None
        half = (self.strength - self.decay) / 2
        return [self.decay + half * (1 + math.cos(math.pi * (1 - t))) for t in schedule[:-1]]

    @property
    def noisy_steps(self) -> int:
        """How many of the S steps can be stochastic: 0 to S."""
        info = sampler_info(self.name)
        return (self.steps if info.noisy_last else self.steps - 1) if info.stochastic else 0

    @property
    def width(self) -> int:
        """w, how many steps are stochastic; 0 for a deterministic sampler or at noise level 0."""
        if self.strength == 0:
            return 0
        return self.noisy_steps if self.window is None else self.window

    def stochastic_steps(self, seed: int, epoch: int | str, prompt: str = "") -> range:
        """The steps (0 is the noisiest) that draw fresh noise in this epoch, for this prompt; the same everywhere."""
        first, end = self.window_range or (0, self.noisy_steps)
        last = end - self.width
        if self.window_move is not None:
            every, stride = self.window_move
            stops = -(-(last - first) // stride) + 1
            moved = (epoch if isinstance(epoch, int) else 0) // every % stops
            start = min(first + moved * stride, last)
        elif self.window_by == "group":
            start = int(torch.randint(first, last + 1, (1,), generator=generator(seed, epoch, prompt, "window")))
        elif self.window_range is not None:
            start = int(torch.randint(first, last + 1, (1,), generator=generator(seed, epoch, "window")))
        else:
            start = 0
        return range(start, start + self.width)
