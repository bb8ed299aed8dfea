"""Forms of the penalty against the definition, by integrating two Gaussians' densities."""

from __future__ import annotations

import math

import pytest
import torch

from diffrl.trainers.divergences import shaped

X = torch.linspace(-30, 30, 600_001, dtype=torch.float64)


def density(mean: float) -> torch.Tensor:
    return (-(X - mean).square() / 2).exp() / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("d", [0.1, 0.7, 2.0, 4.0])
def test_chi_squared_and_jensen_shannon_are_the_integrals(d: float) -> None:
    kl = torch.tensor([d**2 / 2], dtype=torch.float64)
    p, q = density(d), density(0.0)
    step = float(X[1] - X[0])
    assert float(shaped(kl, "kl")) == pytest.approx(float((p * (p / q).log())[q > 0].sum()) * step, rel=1e-6)
    assert float(shaped(kl, "chi2")) == pytest.approx(float((p.square() / q)[q > 1e-150].sum()) * step - 1, rel=1e-6)
    m = (p + q) / 2
    js = sum((a * (a / m).log()).nan_to_num(0.0).sum() for a in (p, q)) * step / 2
    assert float(shaped(kl, "js")) == pytest.approx(float(js), rel=1e-4)


def test_near_zero_and_far_away() -> None:
    kl = torch.tensor([0.0, 1e-6, 400.0], dtype=torch.float64, requires_grad=True)
    js = shaped(kl, "js")
    (slope,) = torch.autograd.grad(js.sum(), kl)
    assert slope[:2].tolist() == pytest.approx([0.25, 0.25], rel=1e-3) and slope[2] == pytest.approx(0, abs=1e-9)
    assert float(js[2]) == pytest.approx(math.log(2)) and float(js[0]) == pytest.approx(0, abs=1e-9)
    (slope,) = torch.autograd.grad(shaped(kl[:2], "chi2").sum(), kl)
    assert slope[:2].tolist() == pytest.approx([2.0, 2.0], rel=1e-5)
