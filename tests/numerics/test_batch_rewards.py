"""Rewards of the whole batch (`rewards/batch.py`) in float64: leave-one-out by definition, its limit, and a set that is
brought to another one."""

import numpy as np
import pytest
import torch

from diffrl_zoo import batch
from diffrl_zoo.batch import Gaussian, vendi_gains

N, D = 40, 6


def unit(count, width=D, seed=0):
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, width)) + 0.5)
    return x / x.norm(dim=1, keepdim=True)


def frechet(x, y):
    """numpy, by the roots of the eigenvalues of S_x S_y."""
    x, y = x.numpy(), y.numpy()
    sx, sy = (np.cov(z, rowvar=False, bias=True) for z in (x, y))
    cross = np.sqrt(np.linalg.eigvals(sx @ sy).real.clip(0)).sum()
    return float(((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(sx) + np.trace(sy) - 2 * cross)


def vendi(x):
    values = np.linalg.eigvalsh(x.numpy() @ x.numpy().T / len(x)).clip(1e-300)
    return float(np.exp(-(values * np.log(values)).sum()))


def without(x, i):
    return torch.cat([x[:i], x[i + 1 :]])


@pytest.mark.parametrize("count", [N, 4], ids=["more images than numbers", "fewer"])
def test_gains_are_the_figure_without_the_image_against_with_it(count):
    x, wanted = unit(count), torch.tensor([3, 0, 2])
    gains, figure = vendi_gains(x, wanted)
    assert figure == pytest.approx(vendi(x), rel=1e-10)
    assert gains.tolist() == pytest.approx([vendi(x) - vendi(without(x, i)) for i in (3, 0, 2)], abs=1e-9)
    y = unit(60, seed=1)
    gains, figure = Gaussian(y).gains(x, wanted)
    assert figure == pytest.approx(frechet(x, y), rel=1e-6)
    expected = [(count - 1) * (frechet(without(x, i), y) - frechet(x, y)) for i in (3, 0, 2)]
    # The cross term is a root: what rounding leaves of a zero eigenvalue, 1e-17, is 1e-8.
    assert gains.tolist() == pytest.approx(expected, abs=1e-8 if count > D else 1e-5)


def test_the_gain_tends_to_the_first_order_influence():
    """dD/de of `(1 + e) p - e delta_i`, with the transport map T = R (R S R)^(-1/2) R: the gap falls as 1 / N."""
    y = unit(80, seed=1)

    def gap(copies):
        x = unit(N).repeat(copies, 1)
        gains, _ = Gaussian(y).gains(x, torch.arange(N))
        target, mean = Gaussian(y), x.mean(0)
        d = x[:N] - mean
        cov = (x - mean).T @ (x - mean) / len(x)
        values, vectors = torch.linalg.eigh(target.root @ cov @ target.root)
        transport = target.root @ (vectors * values.rsqrt() @ vectors.T) @ target.root
        influence = -2 * d @ (mean - target.mean) + cov.trace() - d.square().sum(1)
        influence += -(transport @ cov).trace() + ((d @ transport) * d).sum(1)
        return float((gains - influence).abs().max())

    gaps = [gap(copies) for copies in (1, 10, 100)]
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.2)
    assert gaps[2] == pytest.approx(gaps[1] / 10, rel=0.2)


def test_a_repetition_adds_less_than_an_image_of_its_own_and_a_batch_of_copies_counts_as_one():
    axes = torch.eye(D, dtype=torch.float64)
    gains, figure = vendi_gains(torch.cat([axes[:3], axes[:1]]), torch.arange(4))
    assert gains[0] == gains[3] < gains[1] == pytest.approx(gains[2])
    assert gains[0] < 0 < gains[1], "a copy makes the others count less evenly"
    gains, figure = vendi_gains(axes[:1].repeat(5, 1), torch.arange(5))
    assert figure == pytest.approx(1.0) and gains.abs().max() < 1e-12
    assert vendi_gains(axes, torch.arange(D))[1] == pytest.approx(D)


def test_blocks_of_images_give_what_all_at_once_give(monkeypatch):
    x, wanted = unit(N), torch.arange(N)
    whole = vendi_gains(x, wanted)[0], Gaussian(unit(60, seed=1)).gains(x, wanted)[0]
    monkeypatch.setattr(batch, "_AT_ONCE", 3 * D * D)
    parts = vendi_gains(x, wanted)[0], Gaussian(unit(60, seed=1)).gains(x, wanted)[0]
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert vendi_gains(x, torch.arange(0))[0].shape == (0,)


def test_a_mixture_with_wrong_weights_is_mended_by_taking_the_images_that_gain_most():
    """Two modes in two dimensions, 90 to 10 where the exemplars have 50 to 50."""
    rng = np.random.default_rng(0)
    modes = np.array([[1.0, 0.0], [-1.0, 0.5]])

    def draw(count, share):
        kind = (rng.random(count) > share).astype(int)
        return torch.from_numpy(modes[kind] + 0.1 * rng.normal(size=(count, 2))), kind

    target = Gaussian(draw(2000, 0.5)[0])
    share, distances = 0.9, []
    for _ in range(20):
        x, kind = draw(400, share)
        gains, distance = target.gains(x, torch.arange(len(x)))
        distances.append(distance)
        weights = torch.softmax(0.2 * gains, 0).numpy()  # what a policy update does: better images become likelier
        share = float(weights[kind == 0].sum())
    assert abs(share - 0.5) < 0.1 and distances[-1] < 0.05 * distances[0]
