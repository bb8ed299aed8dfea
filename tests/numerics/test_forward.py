"""The forward processes against their formulas and against diffusers' schedulers."""

import pytest
import torch
from diffusers import DDPMScheduler

from diffrl.forward import FlowMatching, Prediction, Process, VariancePreserving, expand

SHAPE = (5, 3, 4, 4)
T = 1000


def grid(zero_terminal: bool = False) -> torch.Tensor:
    """Stable Diffusion's schedule in float64."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, T, dtype=torch.float64) ** 2
    values = (1 - betas).cumprod(0)
    if zero_terminal:
        values[-1] = 0.0
    return values


def pair() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, *SHAPE, generator=draw, dtype=torch.float64)
    return x0, eps, torch.tensor([0.001, 0.2503, 0.5, 0.75, 0.999], dtype=torch.float64)


def check(found: Prediction, x0: torch.Tensor, eps: torch.Tensor, v: torch.Tensor, tolerance: float) -> None:
    for name, want in (("x0", x0), ("eps", eps), ("v", v)):
        torch.testing.assert_close(
            getattr(found, name), want, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_expand_broadcasts_one_value_per_sample() -> None:
    out = expand(torch.tensor([1.0, 2.0]), torch.ones(2, 3, 4, 4)) * torch.ones(2, 3, 4, 4)
    assert out[0].unique().tolist() == [1.0] and out[1].unique().tolist() == [2.0]


def test_flow_matching_is_the_straight_path() -> None:
    x0, eps, t = pair()
    x_t = FlowMatching().add_noise(x0, eps, t)
    for i, ti in enumerate(t.tolist()):
        torch.testing.assert_close(x_t[i], (1 - ti) * x0[i] + ti * eps[i], rtol=0, atol=1e-15)
    velocity = torch.func.jvp(lambda s: FlowMatching().add_noise(x0, eps, s), (t,), (torch.ones_like(t),))[1]
    torch.testing.assert_close(FlowMatching().velocity(x0, eps, t), velocity, rtol=0, atol=1e-14)  # v = d x_t / dt


@pytest.mark.parametrize("process", [FlowMatching(), VariancePreserving(grid())], ids=["flow", "vp"])
def test_every_form_gives_the_others(process: Process) -> None:
    x0, eps, t = pair()
    x_t, v = process.add_noise(x0, eps, t), process.velocity(x0, eps, t)
    check(process.from_velocity(x_t, v, t), x0, eps, v, 1e-13)
    check(process.from_x0(x_t, x0, t), x0, eps, v, 1e-11)  # divides by sigma
    check(process.from_eps(x_t, eps, t), x0, eps, v, 1e-11)  # divides by alpha


def test_flow_velocity_gives_x0_at_pure_noise_and_at_the_clean_end() -> None:
    x0, eps, _ = pair()
    for level in (0.0, 1.0):
        t = torch.full((5,), level, dtype=torch.float64)
        x_t = FlowMatching().add_noise(x0, eps, t)
        check(FlowMatching().from_velocity(x_t, eps - x0, t), x0, eps, eps - x0, 1e-15)


def test_variance_preserving_is_exact_on_the_training_grid() -> None:
    values = grid()
    process = VariancePreserving(values)
    t = torch.arange(1, T + 1, dtype=torch.float64) / T
    torch.testing.assert_close(process.alpha(t), values.sqrt(), rtol=1e-14, atol=0)
    torch.testing.assert_close(process.sigma(t), (1 - values).sqrt(), rtol=1e-12, atol=0)
    torch.testing.assert_close(process.index(t), torch.arange(T, dtype=torch.float64), rtol=0, atol=1e-12)


def test_variance_preserving_between_grid_points() -> None:
    values = grid()
    process = VariancePreserving(values)
    half = process.alpha(torch.tensor([0.5 + 0.5 / T], dtype=torch.float64))  # between the steps 499 and 500
    assert half.item() == pytest.approx((values[499].sqrt() + values[500].sqrt()).item() / 2, abs=1e-15)
    t = torch.linspace(0, 1, 4001, dtype=torch.float64)
    torch.testing.assert_close(process.alpha(t) ** 2 + process.sigma(t) ** 2, torch.ones_like(t), rtol=0, atol=1e-15)
    assert (process.alpha(t).diff() < 0).all() and (process.sigma(t).diff() > 0).all()


def test_variance_preserving_ends() -> None:
    process = VariancePreserving(grid(zero_terminal=True))
    x0, eps, _ = pair()
    clean, noise = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    assert torch.equal(process.add_noise(x0, eps, clean), x0)
    assert torch.equal(process.add_noise(x0, eps, noise), eps)
    check(process.from_velocity(eps, process.velocity(x0, eps, noise), noise), x0, eps, -x0, 1e-15)


def test_variance_preserving_keeps_digits_in_float32() -> None:
    values = grid()
    t = torch.arange(1, T + 1) / T
    for name, want in (("alpha", values.sqrt()), ("sigma", (1 - values).sqrt())):
        found = getattr(VariancePreserving(values), name)(t)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=0)
    first = VariancePreserving(values).sigma(t[:1]).double()  # 1 - alpha^2 in float32 would be off by 3e-5 here
    torch.testing.assert_close(first, (1 - values[:1]).sqrt(), rtol=2e-7, atol=0)


def test_variance_preserving_agrees_with_diffusers() -> None:
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    process = VariancePreserving(scheduler.alphas_cumprod)
    x0, eps, _ = (value.float() for value in pair())
    step = torch.tensor([0, 10, 500, 998, 999])
    t = (step + 1) / T
    torch.testing.assert_close(process.index(t), step.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(process.add_noise(x0, eps, t), scheduler.add_noise(x0, eps, step), rtol=0, atol=2e-5)
    torch.testing.assert_close(process.velocity(x0, eps, t), scheduler.get_velocity(x0, eps, step), rtol=0, atol=2e-5)


@pytest.mark.parametrize("values", [torch.ones(2, 2), torch.tensor([0.5, 1.5]), torch.tensor([0.5, -0.1])])
def test_variance_preserving_refuses_what_is_no_schedule(values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="alphas_cumprod must be one-dimensional with values in"):
        VariancePreserving(values)
