"""Solver steps against their formulas, against diffusers' schedulers and on a target whose answer is known."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from diffrl.errors import UserError
from diffrl.forward import FlowMatching, Prediction, Process, VariancePreserving
from diffrl.samplers import (
    check_process,
    cps,
    ddim,
    euler_step,
    flow_sde,
    gaussian_log_prob,
    ode_step,
    sde_kernel,
)
from diffrl.sampling import SAMPLERS, SamplerSpec

FLOW = FlowMatching()
VP = VariancePreserving((1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2).cumprod(0))
STOCHASTIC = [name for name, info in SAMPLERS.items() if info.stochastic]
TO_THE_ODE = [name for name in STOCHASTIC if name != "renoise"]  # which is for consistency models: see its own tests
SECOND = 0.9  # second level of the schedule that the rows below come from


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, v (5, 2, 3, 3) and one (t, t_next) per row, with the first and the last step of a schedule."""
    draw = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 5, 2, 3, 3, generator=draw, dtype=torch.float64).to(dtype)
    t = torch.tensor([1.0, 0.9, 0.6, 0.31, 0.05], dtype=dtype)
    return x, v, t, torch.tensor([0.9, 0.75, 0.3, 0.30, 0.0], dtype=dtype)


def kernel(name: str, x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, level: float) -> tuple[Tensor, Tensor]:
    return sde_kernel(name, x, FLOW.from_velocity(x, v, t), t, t_next, level, SECOND, FLOW)


# --- the formulas, number by number, in float64 ------------------------------------------------------------------


def literal_flow_sde(x: float, v: float, t: float, t_next: float, a: float) -> tuple[float, float]:
    s = a * math.sqrt(t / (1 - (SECOND if t == 1 else t)))
    dt = t_next - t
    mean = x * (1 + s**2 / (2 * t) * dt) + v * (1 + s**2 * (1 - t) / (2 * t)) * dt
    return mean, s * math.sqrt(-dt)


def literal_dance(x: float, v: float, t: float, t_next: float, a: float) -> tuple[float, float]:
    """In the published form: Euler's step minus a^2/2 times the score of x_t given the predicted x0."""
    score = -(x - (x - t * v) * (1 - t)) / t**2
    return x + (t_next - t) * v - 0.5 * a**2 * score * (t_next - t), a * math.sqrt(t - t_next)


def literal_cps(x: float, v: float, t: float, t_next: float, a: float) -> tuple[float, float]:
    std = t_next * math.sin(a * math.pi / 2)
    x0, noise = x - t * v, x + (1 - t) * v
    return x0 * (1 - t_next) + noise * math.sqrt(t_next**2 - std**2), std


@pytest.mark.parametrize("level", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(
    ("name", "literal"), [("flow_sde", literal_flow_sde), ("dance", literal_dance), ("cps", literal_cps)]
)
def test_kernel_is_the_formula(name: str, literal: Callable[..., tuple[float, float]], level: float) -> None:
    x, v, t, t_next = rows()
    mean, std = kernel(name, x, v, t, t_next, level)
    assert mean.shape == x.shape and std.shape == (5, 1, 1, 1)
    for i in range(5):
        for place in ((0, 0, 0), (1, 2, 1)):
            want = literal(x[i][place].item(), v[i][place].item(), t[i].item(), t_next[i].item(), level)
            assert mean[i][place].item() == pytest.approx(want[0], rel=1e-12, abs=1e-12)
            assert std[i].item() == pytest.approx(want[1], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("process", [FLOW, VP])
def test_renoise_is_the_consistency_models_step(process: Any) -> None:
    x, v, t, t_next = rows()
    prediction = process.from_velocity(x, v, t)
    mean, std = sde_kernel("renoise", x, prediction, t, t_next, 1.0, SECOND, process)
    alpha, sigma = (value.view(-1, 1, 1, 1) for value in (process.alpha(t_next), process.sigma(t_next)))
    torch.testing.assert_close(mean, alpha * prediction.x0)  # the predicted noise does not enter
    torch.testing.assert_close(std, sigma)
    none, zero = sde_kernel("renoise", x, prediction, t, t_next, 0.0, SECOND, process)
    torch.testing.assert_close(none, process.add_noise(prediction.x0, prediction.eps, t_next))
    assert not zero.any()
    if process is FLOW:
        for ours, cps in zip((mean, std), kernel("cps", x, v, t, t_next, 1.0), strict=True):
            torch.testing.assert_close(ours, cps, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("a", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("process", [FLOW, VP])
def test_renoise_with_a_share_of_fresh_noise(process: Any, a: float) -> None:
    """alpha' x0 + sigma' (sqrt(1 - a^2) eps + a fresh): of the step's noise, the variance a^2 is new."""
    x, v, t, t_next = rows()
    prediction = process.from_velocity(x, v, t)
    mean, std = sde_kernel("renoise", x, prediction, t, t_next, a, SECOND, process)
    for i in range(len(x)):
        alpha, sigma = process.alpha(t_next)[i].item(), process.sigma(t_next)[i].item()
        assert std[i].item() == pytest.approx(a * sigma, rel=1e-12)
        for place in ((0, 0, 0), (1, 2, 1)):
            x0, eps = prediction.x0[i][place].item(), prediction.eps[i][place].item()
            want = alpha * x0 + sigma * math.sqrt(1 - a * a) * eps
            assert mean[i][place].item() == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_a_consistency_function_keeps_the_marginal_in_any_number_of_steps() -> None:
    """Data N(1, 0.5^2): the ODE's map f to the clean end is affine; renoising from it leaves the data's law."""
    mean, spread, n = 1.0, 0.5, 200_000
    draws = torch.Generator().manual_seed(0)

    def f(x: Tensor, t: float) -> Tensor:  # exact: the ODE keeps the standardised position
        scale = math.sqrt((1 - t) ** 2 * spread**2 + t**2)
        return mean + spread * (x - (1 - t) * mean) / scale

    for levels in ([1.0, 0.0], [1.0, 0.75, 0.5, 0.25, 0.0]):
        x = torch.randn(n, 1, 1, 1, generator=draws, dtype=torch.float64)
        for t, t_next in pairwise(levels):
            x0 = f(x, t)
            eps = (x - (1 - t) * x0) / t
            level, following = torch.full((n,), t, dtype=torch.float64), torch.full((n,), t_next, dtype=torch.float64)
            found, std = sde_kernel("renoise", x, Prediction(x0, eps, eps - x0), level, following, 1.0, 0.75, FLOW)
            x = found + std * torch.randn(n, 1, 1, 1, generator=draws, dtype=torch.float64)
        assert float(x.mean()) == pytest.approx(mean, abs=0.005) and float(x.std()) == pytest.approx(spread, abs=0.005)


@pytest.mark.parametrize("name", ["flow_sde", "dance", "cps", "renoise", "ddim"])
def test_a_row_may_have_its_own_noise_level(name: str) -> None:
    x, v, t, t_next = rows()
    levels = torch.linspace(0.2, 1.0, 5, dtype=torch.float64)
    mean, std = sde_kernel(name, x, FLOW.from_velocity(x, v, t), t, t_next, levels, SECOND, FLOW)
    for i, level in enumerate(levels.tolist()):
        one = slice(i, i + 1)
        want = kernel(name, x[one], v[one], t[one], t_next[one], level)
        torch.testing.assert_close((mean[one], std[one]), want, rtol=1e-12, atol=1e-14)


def test_flow_sde_takes_the_second_level_only_at_pure_noise() -> None:
    x, v, t, t_next = rows()
    near, far = flow_sde(x, v, t, t_next, 0.7, 0.9), flow_sde(x, v, t, t_next, 0.7, 0.5)
    assert near[1][0] > far[1][0] and torch.equal(near[1][1:], far[1][1:])
    assert torch.equal(near[0][1:], far[0][1:]) and not torch.equal(near[0][0], far[0][0])


def test_ddim_is_the_formula_of_the_paper() -> None:
    x, v, t, t_next = rows()
    prediction = VP.from_velocity(x, v, t)
    for eta in (0.0, 0.5, 1.0):
        mean, std = ddim(prediction.x0, prediction.eps, VP, t, t_next, eta)
        for i in range(5):
            now, later = VP.alpha(t)[i].item() ** 2, VP.alpha(t_next)[i].item() ** 2  # the paper's alpha
            sigma = eta * math.sqrt((1 - later) / (1 - now)) * math.sqrt(1 - now / later)
            want = math.sqrt(later) * prediction.x0[i] + math.sqrt(1 - later - sigma**2) * prediction.eps[i]
            assert std[i].item() == pytest.approx(sigma, rel=1e-11, abs=1e-15)
            torch.testing.assert_close(mean[i], want, rtol=0, atol=1e-12)


# --- log-probability, ratio, zero noise --------------------------------------------------------------------------


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_prob_is_that_of_torch_distributions(name: str, dtype: torch.dtype) -> None:
    x, v, t, t_next = (
        value[:4] for value in rows(dtype)
    )  # without the step to t = 0, where cps and ddim have no noise
    mean, std = kernel(name, x, v, t, t_next, 0.7)
    x_next = mean + std * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    want = torch.distributions.Normal(mean, std).log_prob(x_next).flatten(1).mean(1)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(gaussian_log_prob(x_next, mean, std), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_ratio_is_exactly_one_on_the_first_pass(name: str) -> None:
    x, v, t, t_next = (value[:4] for value in rows(torch.float32))
    mean, std = kernel(name, x, v, t, t_next, 0.7)
    x_next = mean + std * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    sampled = gaussian_log_prob(x_next, mean, std)
    again_v = v.clone().requires_grad_()  # the same prediction, this time with a graph
    again = gaussian_log_prob(x_next, *kernel(name, x, again_v, t, t_next, 0.7))
    assert torch.equal((again - sampled).exp(), torch.ones(4))
    again.sum().backward()
    assert again_v.grad is not None and again_v.grad.abs().amax(dim=(1, 2, 3)).min() > 0
    order = torch.tensor([2, 0, 3, 1])  # training shuffles the rows and takes them in other batches
    shuffled = gaussian_log_prob(x_next[order], *kernel(name, x[order], v[order], t[order], t_next[order], 0.7))
    assert torch.equal(shuffled, sampled[order])


@pytest.mark.parametrize("name", STOCHASTIC)
def test_zero_noise_is_the_ode_step(name: str) -> None:
    x, v, t, t_next = rows()
    mean, std = kernel(name, x, v, t, t_next, 0.0)
    assert std.abs().max() == 0
    euler = euler_step(x, v, t, t_next)
    torch.testing.assert_close(mean, euler, rtol=0, atol=1e-14)
    torch.testing.assert_close(ode_step(name, x, FLOW.from_velocity(x, v, t), t, t_next, None, FLOW)[0], euler)


def test_deterministic_step_of_a_variance_preserving_model_is_ddim() -> None:
    x, v, t, t_next = rows()
    prediction = VP.from_velocity(x, v, t)
    mean, std = ddim(prediction.x0, prediction.eps, VP, t, t_next, 0.0)
    assert std.abs().max() == 0
    torch.testing.assert_close(ode_step("ddim", x, prediction, t, t_next, None, VP)[0], mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_noise_of_the_last_step(name: str) -> None:
    x, v, t, t_next = rows()
    std = kernel(name, x, v, t, t_next, 0.7)[1].flatten()
    assert (std[:4] > 0).all()
    assert (std[4] > 0) == (SAMPLERS[name].quiet_steps == 0) == (name in ("flow_sde", "dance"))


@pytest.mark.parametrize("process", [FLOW, VP], ids=["flow", "vp"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_step_waits_for_the_device(name: str, process: Process) -> None:
    """Meta tensors hold no values: any read of one by the host raises."""
    if SAMPLERS[name].flow_only and not isinstance(process, FlowMatching):
        return
    x, v, t, t_next = (value.to("meta") for value in rows(torch.float32))
    p = process.from_velocity(x, v, t)
    if SAMPLERS[name].stochastic:
        mean, std = sde_kernel(name, x, p, t, t_next, 0.7, SECOND, process)
        gaussian_log_prob(x, mean, std)
    out, state = ode_step(name, x, p, t, t_next, None, process)
    assert ode_step(name, out, p, t, t_next, state, process)[0].shape == x.shape


# --- a Gaussian target: the velocity is known, every sampler must end at the same distribution ----------------------

MEAN = torch.tensor([0.8, -0.5], dtype=torch.float64)
COV = torch.tensor([[0.9, 0.4], [0.4, 0.5]], dtype=torch.float64)
EYE = torch.eye(2, dtype=torch.float64)


def velocity(x: Tensor, t: float) -> Tensor:
    """E[eps - x0 | x_t = x] for x0 ~ N(MEAN, COV); affine in x."""
    seen = (1 - t) ** 2 * COV + t**2 * EYE
    x0 = MEAN + (1 - t) * (x - (1 - t) * MEAN) @ torch.linalg.solve(seen, COV)
    return (x - x0) / t


def level_of(name: str, steps: int) -> float:
    """cps draws a share of the noise per step, so the share has to shrink with the step (see its docstring)."""
    return {"cps": 2 / math.sqrt(steps), "ddim": 1.0}.get(name, 0.7)


def step_of(name: str, x: Tensor, i: int, levels: list[float]) -> tuple[Tensor, Tensor]:
    t, t_next = x.new_full((len(x),), levels[i]), x.new_full((len(x),), levels[i + 1])
    v = velocity(x, levels[i])
    if name == "euler":
        return euler_step(x, v, t, t_next), torch.zeros(len(x), 1, dtype=x.dtype)
    p = FLOW.from_velocity(x, v, t)
    return sde_kernel(name, x, p, t, t_next, level_of(name, len(levels) - 1), levels[1], FLOW)


@pytest.mark.parametrize("name", ["euler", *TO_THE_ODE])
def test_sde_and_ode_reach_the_same_gaussian(name: str) -> None:
    particles, steps = 8000, 300
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    draw = torch.Generator().manual_seed(3)
    start = x = torch.randn(particles, 2, generator=draw, dtype=torch.float64)
    for i in range(steps):
        mean, std = step_of(name, x, i, levels)
        x = mean + std * torch.randn(x.shape, generator=draw, dtype=x.dtype)
    spread = COV.diagonal()
    error_of_mean = (spread / particles).sqrt()
    error_of_cov = ((spread[:, None] * spread[None] + COV**2) / particles).sqrt()
    assert ((x.mean(0) - MEAN).abs() < 4 * error_of_mean).all()
    assert ((x.T.cov() - COV).abs() < 4 * error_of_cov).all()
    kept = torch.corrcoef(torch.stack([start[:, 0], x[:, 0]]))[0, 1]
    assert (kept > 0.9) == (name == "euler")  # the stochastic ones did forget their start


def moments(name: str, steps: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance after `steps` steps without sampling: every step is affine in x."""
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    mean, cov = torch.zeros(2, dtype=torch.float64), EYE
    for i in range(steps):
        out, std = step_of(name, torch.cat([torch.zeros(1, 2, dtype=torch.float64), EYE]), i, levels)
        a, b = (out[1:] - out[0]).T, out[0]
        mean, cov = a @ mean + b, a @ cov @ a.T + std[0].square() * EYE
    return mean, cov


@pytest.mark.parametrize("name", ["euler", *TO_THE_ODE])
def test_marginals_converge_to_the_target(name: str) -> None:
    """First order in the step; flow_sde, whose noise grows like 1 / (1 - t) towards the start, of order a^2 (about)."""
    errors = []
    for steps in (300, 1200):
        mean, cov = moments(name, steps)
        assert (mean - MEAN).abs().max() < 1e-12
        errors.append((cov - COV).abs().max().item())
    assert errors[1] < 0.006
    assert errors[1] < (0.7 if name == "flow_sde" else 0.27) * errors[0]


def test_cps_keeps_the_marginals_of_a_known_image_in_few_steps() -> None:
    """With x0 known exactly, x_t ~ N((1 - t) x0, t^2) at every step and any noise level: 'coefficients-preserving'."""
    mean, variance, levels = 0.0, 1.0, [1.0, 0.7, 0.4, 0.1]
    for t, t_next in pairwise(levels):
        x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        one = torch.ones(2, dtype=torch.float64)
        out, std = cps(x, (x - 1.5) / t, t * one, t_next * one, 0.7)  # v = (x - x0) / t
        slope = (out[1] - out[0]).item()
        mean, variance = slope * mean + out[0].item(), slope**2 * variance + std[0].item() ** 2
        if t < 1:  # the start has mean 0 = (1 - 1) x0
            assert mean == pytest.approx((1 - t_next) * 1.5, abs=1e-12)
        assert variance == pytest.approx(t_next**2, abs=1e-12)


# --- diffusers' schedulers ------------------------------------------------------------------------------------------


def network(x: Tensor, t: float) -> Tensor:
    """Some smooth function of x and t in the place of a network's output."""
    return torch.tanh(x * (0.5 + t)) + 0.3 * x.flip(1) - t


def start_noise() -> Tensor:
    return torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(5))


def integrate(
    name: str, levels: list[float], process: Process, predict: Callable[[Tensor, Tensor, float], Prediction]
) -> Tensor:
    x, state = start_noise(), None
    for level, level_next in pairwise(levels):
        t, t_next = x.new_full((2,), level), x.new_full((2,), level_next)
        x, state = ode_step(name, x, predict(x, t, level), t, t_next, state, process)
    return x


def run_scheduler(scheduler: Any, model: Callable[[Tensor, int], Tensor], **options: Any) -> Tensor:
    x = start_noise()
    scheduler.set_begin_index(0) if hasattr(scheduler, "set_begin_index") else None
    for i, step in enumerate(scheduler.timesteps):
        x = scheduler.step(model(x, i), step, x, **options).prev_sample
    return x


@pytest.mark.parametrize(("steps", "shift"), [(10, 3.0), (28, 1.0)])
def test_euler_is_diffusers(steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    levels = scheduler.sigmas.tolist()
    want = run_scheduler(scheduler, lambda x, i: network(x, levels[i]))
    found = integrate("euler", levels, FLOW, lambda x, t, level: FLOW.from_velocity(x, network(x, level), t))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pure_noise", [False, True], ids=["own sigmas", "from t = 1"])
@pytest.mark.parametrize(("steps", "shift"), [(2, 1.0), (10, 3.0), (20, 1.0)])
def test_dpm2_is_diffusers_for_flow_matching(steps: int, shift: float, pure_noise: bool) -> None:
    scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=shift)
    scheduler.set_timesteps(steps)
    if pure_noise:  # a rollout's schedule is the plain pipeline's, which starts at exactly 1
        plain = FlowMatchEulerDiscreteScheduler(shift=shift)
        plain.set_timesteps(steps)
        scheduler.sigmas = plain.sigmas
        assert plain.sigmas[0] == 1
    levels = scheduler.sigmas.tolist()
    want = run_scheduler(scheduler, lambda x, i: network(x, levels[i]))
    found = integrate("dpm2", levels, FLOW, lambda x, t, level: FLOW.from_velocity(x, network(x, level), t))
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)
    if steps > 2:  # and it is not first order all along
        euler = integrate("euler", levels, FLOW, lambda x, t, level: FLOW.from_velocity(x, network(x, level), t))
        assert (euler - found).abs().max() > 1e-2


def vp_levels(timesteps: Tensor) -> list[float]:
    return [*((timesteps + 1) / 1000).tolist(), 0.0]


def test_dpm2_is_diffusers_for_variance_preserving() -> None:
    config = {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "timestep_spacing": "trailing",
    }
    scheduler = DPMSolverMultistepScheduler(**config)
    scheduler.set_timesteps(10)
    levels = vp_levels(scheduler.timesteps)
    want = run_scheduler(scheduler, lambda x, i: network(x, levels[i]))
    found = integrate("dpm2", levels, VP, lambda x, t, level: VP.from_eps(x, network(x, level), t))
    torch.testing.assert_close(found, want, rtol=0, atol=5e-4)  # latents of about 20: alpha is 0.07 at the start


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_is_diffusers(eta: float) -> None:
    config = {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "timestep_spacing": "trailing",
    }
    scheduler = DDIMScheduler(**config, clip_sample=False, set_alpha_to_one=True)
    scheduler.set_timesteps(10)
    levels = vp_levels(scheduler.timesteps)
    noise = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(6))
    want = run_scheduler(
        scheduler, lambda x, i: network(x, levels[i]), eta=eta, variance_noise=noise if eta > 0 else None
    )
    x = start_noise()
    for level, level_next in pairwise(levels):
        t, t_next = x.new_full((2,), level), x.new_full((2,), level_next)
        mean, std = sde_kernel("ddim", x, VP.from_eps(x, network(x, level), t), t, t_next, eta, 0.0, VP)
        x = mean + std * noise
    torch.testing.assert_close(x, want, rtol=1e-4, atol=5e-4)


# --- the table of samplers --------------------------------------------------------------------------------


def test_unknown_and_unfit_samplers() -> None:
    with pytest.raises(UserError, match=r'rollout.sampler: unknown sampler "flow_sd" \(nearest: "flow_sde"\)'):
        SamplerSpec(sampler="flow_sd")
    with pytest.raises(UserError, match='"flow_sde" is not defined for a VariancePreserving model; use ddim'):
        check_process("flow_sde", VP)
    with pytest.raises(UserError, match='"euler" is not defined for a VariancePreserving model; use dpm2'):
        check_process("euler", VP)
