"""CRD against literal float64 transcriptions of its equations, its invariances, and an optimum that is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import averages

from diffrl.advantages import group_advantages
from diffrl.methods.crd.centring import centring_weights, diagnose, group_averages
from diffrl.methods.crd.objective import anchor_strength, crd_loss, external_reward
from diffrl.methods.shared.coupling import velocity_error
from diffrl.objectives.objective import RunningMeans

P, G, SHAPE = 2, 4, (3, 4, 4)


def fixed(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def implicit(v: torch.Tensor, v_old: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return velocity_error(v_old, target) - velocity_error(v, target)


def ours(r: torch.Tensor, a: torch.Tensor, b: float = 1.0) -> torch.Tensor:
    """Losses (P G, K) of implicit rewards r (P G,) and advantages a (P G, K), through the package's functions."""
    q = external_reward(a, 5.0).view(-1, G, a.shape[1])
    weights = centring_weights(torch.ones_like(q, dtype=torch.bool))
    qc = (q - group_averages(q, weights)).flatten(0, 1)
    r_mean = group_averages(r.detach().view(-1, G, 1), weights).expand_as(weights).flatten(0, 1)
    return crd_loss(r, r_mean, qc, 5.0, b)


def by_hand(v, v_old, target, a, b):
    """CRD (methods section 4), one prompt group and one reward at a time, in the order the equations are written."""
    losses = torch.zeros(P * G, a.shape[1], dtype=torch.float64)
    for k in range(a.shape[1]):
        for p in range(P):
            group = range(p * G, (p + 1) * G)
            r, q = {}, {}
            for i in group:
                terms = []
                for prediction in (v[i], v_old[i]):
                    w = max(float((prediction - target[i]).detach().abs().mean()), 1e-5)
                    terms.append(((prediction - target[i]) ** 2).mean() / w)
                r[i] = -(terms[0] - terms[1])
                q[i] = max(-5.0, min(5.0, float(a[i, k]))) / 10 + 0.5
            r_mean = sum(r[i].detach() for i in group) / G
            q_mean = sum(q[i] for i in group) / G
            for i in group:
                losses[i, k] = 5.0 / b * (b * (r[i] - r_mean) - (q[i] - q_mean)) ** 2
    return losses


@pytest.mark.parametrize("b", [1.0, 0.5, 2.0])
def test_crd_loss_is_the_papers(b: float) -> None:
    target, v_old = fixed(0, P * G, *SHAPE), fixed(1, P * G, *SHAPE)
    v = (v_old + 0.5 * fixed(2, P * G, *SHAPE)).requires_grad_()
    a = fixed(3, P * G, 2) * 3
    a[0], a[1] = 7.0, -9.0  # both sides of the clip
    mine = ours(implicit(v, v_old, target), a, b)
    theirs = by_hand(v, v_old, target, a, b)
    assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-14)
    for k in range(2):
        g_mine = torch.autograd.grad(mine[:, k].sum(), v, retain_graph=True)[0]
        g_theirs = torch.autograd.grad(theirs[:, k].sum(), v, retain_graph=True)[0]
        assert g_mine.abs().max() > 1e-3 and torch.allclose(g_mine, g_theirs, rtol=1e-10, atol=1e-14)


def test_a_vanishing_velocity_error_is_divided_by_the_floor() -> None:
    target = fixed(0, 1, *SHAPE)
    error = velocity_error(target + 1e-7, target)
    assert float(error) == pytest.approx(1e-14 / 1e-5, rel=1e-6)


def test_weights_are_averages_over_the_known_members() -> None:
    known = torch.ones(P, G, 2, dtype=torch.bool)
    known[0, 1:3, 0] = False
    known[1, :, 1] = False
    weights = centring_weights(known)
    assert weights.isfinite().all() and (weights[~known] == 0).all()
    assert weights.sum(1).tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(("members", "std"), [(16, "group"), (16, "none"), (24, "group"), (24, "none")])
def test_a_constant_per_prompt_changes_nothing_to_the_bit(members: int, std: str) -> None:
    """Scores and constants are multiples of 2^-10 below 2^13, so that adding a constant to a score loses nothing.

    In groups of 16 every later operation up to the centred score is exact, too: equality is certain. A mean over 24
    rounds in the 53rd bit; float32 hides it, here as nearly always. With std = "batch" the constants are part of the
    batch's spread: the common scale changes, by definition, and only that.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 1024, (6 * members, 2), generator=generator) / 1024
    groups = torch.arange(6).repeat_interleave(members)
    shifted = scores + torch.randint(-4096, 4096, (6, 2), generator=generator)[groups] * 0.75
    assert not torch.equal(scores, shifted)
    plain, moved = (group_advantages(s, groups, std) for s in (scores, shifted))  # type: ignore[arg-type]
    assert torch.equal(plain, moved)
    batch, batch_moved = (group_advantages(s, groups, "batch").double() for s in (scores, shifted))
    scale = (batch * batch_moved).sum(0) / batch.square().sum(0)
    assert not torch.allclose(scale, torch.ones_like(scale)) and torch.allclose(batch_moved, scale * batch, atol=1e-6)


def test_a_constant_on_the_implicit_rewards_of_a_prompt_changes_nothing() -> None:
    r, a = fixed(0, P * G), fixed(1, P * G, 1)
    moved = r + torch.arange(P).repeat_interleave(G) * 3.0
    assert torch.allclose(ours(r, a), ours(moved, a), rtol=1e-9, atol=1e-12)


def test_anchor_strength_runs_from_the_floor_to_beta() -> None:
    q = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    c_min = 1e-4 / 0.1
    assert anchor_strength(q, 1e-4, 0.1).tolist() == pytest.approx(
        [0.1 * (c_min + x * (1 - c_min)) for x in (0, 0.25, 1)]
    )
    assert anchor_strength(q, 1e-4, 0.1)[0] == pytest.approx(1e-4)
    assert anchor_strength(q, 1e-5, 1e-5).tolist() == pytest.approx([1e-5] * 3)


def test_one_prompt_reaches_the_tilted_distribution() -> None:
    """One prompt with 8 possible images: p* is proportional to p_ref exp(R / beta), known in closed form.

    The implicit reward is the exact log-ratio beta log(p_theta / p_ref), as the derivation has it before the velocity
    errors bound it; groups of G are drawn from the current policy. With advantages A = R (no std) in the clip range,
    q = A / 10 + 1/2, so the loss's own unit is beta' = 10 beta: b r = beta log ratio / 10.
    """
    beta, outcomes = 0.5, 8
    generator = torch.Generator().manual_seed(0)
    reward, p_ref = fixed(5, outcomes), fixed(6, outcomes).softmax(0)
    logits = p_ref.log().clone().requires_grad_()
    best = (p_ref.log() + reward / beta).softmax(0)
    distance = lambda: float((logits.detach().softmax(0) - best).abs().sum() / 2)  # noqa: E731
    assert distance() > 0.2
    optimiser = torch.optim.Adam([logits], lr=0.1)
    groups = torch.arange(32).repeat_interleave(G)
    for _ in range(200):
        drawn = torch.multinomial(logits.detach().softmax(0), 32 * G, replacement=True, generator=generator)
        a = group_advantages(reward[drawn][:, None], groups, "none")
        assert a.abs().max() < 5
        r = beta * (logits.log_softmax(0) - p_ref.log())[drawn] / 10
        optimiser.zero_grad()
        ours(r, a).mean().backward()
        optimiser.step()
    assert distance() < 0.005  # 2 % would let a beta that is 10 % off pass: 0.019


def test_what_is_told_of_the_groups_is_their_spread_and_correlation() -> None:
    draw = torch.Generator().manual_seed(3)
    r, q = torch.randn(5, 4, generator=draw) + 3, torch.randn(5, 4, 2, generator=draw) - 1
    means = RunningMeans()
    diagnose(r, q, means)
    told = averages(means)
    assert told["crd/r_theta_std"] == pytest.approx(float(r.std(dim=1, correction=0).mean()), rel=1e-5)
    each = [np.corrcoef(r[p].numpy(), q[p, :, k].numpy())[0, 1] for p in range(5) for k in range(2)]
    assert told["crd/correlation"] == pytest.approx(float(np.mean(each)), rel=1e-4)
