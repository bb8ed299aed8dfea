"""Pairs, regressions and rankings of a group: each gradient against the paper's loss in float64, and their limits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from diffrl.methods.awm.objective import awm_loss, matching_loss
from diffrl.methods.branches.credit import Branching
from diffrl.methods.dense.credit import Dense, calibrated, gains_of
from diffrl.methods.dgpo.objective import group_slopes, stopped
from diffrl.methods.dpo.objective import first_and_last, pair_slopes
from diffrl.methods.fdfo.objective import fdfo_loss, log_ratio
from diffrl.methods.gdro.objective import plackett_luce_slopes
from diffrl.methods.nft.objective import contrastive_losses, nft_loss
from diffrl.methods.prdp.objective import prdp_loss
from diffrl.methods.rwr.objective import reward_weights
from diffrl.methods.shared.coupling import best_and_worst, best_of_group, chosen_pairs
from diffrl.methods.tree.credit import Branched
from diffrl.objectives.advantages import AdvantageRule, ScoredBatch

NAN = math.nan


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- which members


def test_the_pair_of_a_group_is_its_best_and_its_worst() -> None:
    scores = torch.tensor(
        [[0.3, 1.0], [0.9, 1.0], [0.9, NAN], [0.1, 0.5], [2.0, 2.0], [2.0, 2.0], [2.0, NAN], [2.0, NAN]]
    )
    groups = torch.arange(8) // 4
    want = torch.tensor([[0, 1], [1, 0], [0, 0], [-1, -1], [0, 0], [0, 0], [0, 0], [0, 0]]).float()
    assert torch.equal(best_and_worst(scores, groups), want)  # the second group agrees: there is no pair
    pairs = chosen_pairs(want, torch.tensor([3, 2, 1, 7, 0]), 2)
    assert pairs.tolist() == [[3, 0], [1, 0], [0, 0], [3, 1], [1, 1], [0, 1]]


def test_the_best_of_a_group_are_all_that_tie() -> None:
    """`(rewards == max).float()` in Flow-GRPO's stat_tracking.py; a score that does not apply is not among them."""
    scores = torch.tensor([[0.3, 1.0], [0.9, 1.0], [0.9, NAN], [0.1, 0.5], [2.0, NAN], [2.0, NAN]])
    want = torch.tensor([[0, 1], [1, 1], [1, 0], [0, 0], [1, 0], [1, 0]]).float()
    assert torch.equal(best_of_group(scores, torch.tensor([0, 0, 0, 0, 1, 1])), want)


# ---- DPO


def test_dpo_slopes_are_the_gradient_of_the_papers_loss() -> None:
    d, b = draw(8, 3).requires_grad_(), 5.0
    a = torch.zeros(8, 2, dtype=torch.float64)
    a[1, 0], a[2, 0], a[4, 0], a[7, 0], a[0, 1], a[3, 1] = 1, -1, 1, -1, 1, -1  # group 2 has no pair for reward 2
    slopes, margin = pair_slopes(d.detach(), a, 2, b)
    for k, pairs in enumerate([[(1, 2), (4, 7)], [(0, 3)]]):
        loss = sum(-logsigmoid(-b / 2 * (d[w] - d[lose])).sum() for w, lose in pairs)
        (want,) = torch.autograd.grad(loss, d, retain_graph=True)
        torch.testing.assert_close(slopes[..., k], want)
    assert margin[0, 0, 0] == pytest.approx(float(d[2, 0] - d[1, 0])) and not margin[1, :, 1].any()
    at_reference, _ = pair_slopes(torch.zeros(8, 3, dtype=torch.float64), a, 2, b)
    torch.testing.assert_close(at_reference, (b / 4 * a)[:, None].expand(8, 3, 2))  # sigma(0) = 1/2: the loss is log 2


# ---- SePPO


def test_seppo_slopes_are_the_gradient_of_the_papers_loss_with_its_sign() -> None:
    """`-log sigma(-b/2 [(e - e_ref)^w - s (e - e_ref)^l])`, s = -1 where the reference predicts x^w better."""
    e, e_ref, b = draw(6, 3).abs().requires_grad_(), draw(6, 3, seed=1).abs(), 5.0
    a = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)[:, None]
    slopes, margin = pair_slopes((e - e_ref).detach(), a, 3, b, flip=True)
    losses, signs = [], []
    for w in (0, 2, 4):
        for t in range(3):
            sign = -1.0 if e_ref[w, t] < e[w, t] else 1.0  # by hand, from the two errors themselves
            u = -((e - e_ref)[w, t] - sign * (e - e_ref)[w + 1, t])
            losses.append(-logsigmoid(b / 2 * u))
            signs.append(sign)
            assert float(margin[w // 2, t, 0]) == pytest.approx(float(u))
    (want,) = torch.autograd.grad(torch.stack(losses).sum(), e)
    torch.testing.assert_close(slopes[..., 0], want)
    assert -1.0 in signs and 1.0 in signs
    assert (slopes[::2] > 0).all()  # the winner's error always falls
    assert torch.equal(slopes[1::2, :, 0] > 0, torch.tensor(signs).view(3, 3) < 0)


def test_without_the_flipper_and_where_theta_is_the_reference_seppo_is_dpo() -> None:
    a = torch.tensor([0.0, 1.0, -1.0, 0.0], dtype=torch.float64)[:, None]
    d = -draw(4, 3).abs()  # theta fits every image better than the reference: nothing is flipped
    for one in (d, torch.zeros_like(d)):
        pairs = zip(pair_slopes(one, a, 1, 5.0, flip=True), pair_slopes(one, a, 1, 5.0), strict=True)
        assert all(torch.equal(flip, plain) for flip, plain in pairs)
    assert torch.equal(
        first_and_last(torch.full((4, 2), NAN), torch.tensor([0, 0, 1, 1]))[:, 1], torch.tensor([1.0, -1, 1, -1])
    )


# ---- RWR


def test_reward_weights_are_a_softmax_of_mean_one_or_an_exponential() -> None:
    scores = torch.tensor([0.1, 0.5, NAN, 0.9, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    groups = torch.arange(8) // 4
    soft = reward_weights(scores, groups, weights="softmax", tau=0.2)[:, 0]
    known = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(soft[[0, 1, 3]], (known / 0.2).softmax(0) * 3)
    assert soft[2] == 0 and torch.equal(soft[4:], torch.ones(4, dtype=torch.float64))
    sharp = reward_weights(scores, groups, weights="softmax", tau=1e-3)[:4, 0]
    torch.testing.assert_close(sharp, torch.tensor([0, 0, 0, 3.0], dtype=torch.float64))  # the limit: best of the group
    grown = reward_weights(scores, groups, "none", weights="exp", tau=0.5)[:, 0]
    torch.testing.assert_close(grown[[0, 1, 3]], ((known - known.mean()) / 0.5).exp())
    assert grown[2] == 0
    steep = reward_weights(scores, groups, "none", weights="exp", tau=0.01)[:, 0]
    assert float(steep[3]) == pytest.approx(math.exp(5.0))  # and not e^40
    plain = reward_weights(scores, groups, weights="linear", tau=1.0)[:, 0]
    torch.testing.assert_close(plain[[0, 1, 3]], known + 0.5)
    assert plain[2] == 0


# ---- GDRO


def plackett_luce(s: Tensor, r: Tensor, tau: float) -> Tensor:
    """The loss of one group, as the paper writes it; a term of a tie begins at its first place."""
    order = r.argsort(descending=True)
    s, r, total = s[order], r[order], s.new_zeros(())
    for i in range(len(s)):  # without a tie the last, a race of one, is 0
        first = r.tolist().index(float(r[i]))
        q = (r[first:] / tau).softmax(0)
        total = total + s[first:].logsumexp(0) - (q * s[first:]).sum()
    return total


@pytest.mark.parametrize("values", [None, 2, 3])
def test_plackett_luce_slopes_are_the_gradient(values: int | None) -> None:
    """Of rewards that differ, and of those of two or three values, whose ties may be listed in any order."""
    s, r = draw(4, 6).requires_grad_(), draw(4, 6, seed=1)
    r = r if values is None else (r.sigmoid() * values).floor()
    if values is not None:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(2))
        listed = plackett_luce_slopes(s.detach()[:, order], r[:, order], 0.3)
        torch.testing.assert_close(listed, plackett_luce_slopes(s.detach(), r, 0.3)[:, order])
    slopes = plackett_luce_slopes(s.detach(), r, 0.3)
    (want,) = torch.autograd.grad(sum(plackett_luce(s[i], r[i], 0.3) for i in range(4)), s)
    torch.testing.assert_close(slopes, want)
    assert slopes.sum(-1).abs().max() < 1e-12
    torch.testing.assert_close(plackett_luce_slopes(s.detach(), r + 7.0, 0.3), slopes)  # a constant changes nothing


def test_two_members_at_temperature_zero_are_dpo() -> None:
    s, r, b = draw(5, 2), draw(5, 2, seed=1), 4.0
    slopes = plackett_luce_slopes(s, r, 1e-9)
    a = torch.where(r == r.amax(-1, keepdim=True), 1.0, -1.0).to(s.dtype)
    # s = -b/2 d here, so dL/ds = -2/b dL/dd
    dpo, _ = pair_slopes((-2 / b * s).reshape(10, 1), a.reshape(10, 1), 5, b)
    torch.testing.assert_close(slopes, -2 / b * dpo.view(5, 2))


def test_tied_members_that_are_as_likely_get_the_same_slope_and_others_are_drawn_together() -> None:
    slopes = plackett_luce_slopes(torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 0.0, 1.0, 0.0]).double(), 0.5)
    assert slopes[0] == slopes[2] < 0 < slopes[1] == slopes[3]
    r = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    one, other = (plackett_luce_slopes(torch.tensor(s).double(), r, 0.05) for s in ([2.0, -2, 0, 0], [-2.0, 2, 0, 0]))
    torch.testing.assert_close(one, other[[1, 0, 2, 3]])
    assert one[0] > 0 > one[1] and one[:2].sum() < 0 < one[2] == one[3]


# ---- AWM


def test_awm_on_policy_is_each_weighting_times_the_advantage() -> None:
    """dL/de = -A dr/de = A w(t, e), whatever the clip: uniform 1, t, t^2, huber t / (2 sqrt e), ghuber t e^-3/4."""
    t, a = draw(6).sigmoid(), draw(6, 2, seed=1)
    for weighting, slope in {
        "uniform": lambda e: torch.ones_like(e),
        "t": lambda e: t,
        "t2": lambda e: t**2,
        "huber": lambda e: t / (2 * (e + 1e-10).sqrt()),
        "ghuber": lambda e: t * (e + 1e-10) ** -0.75,
    }.items():
        e = draw(6, seed=2).square().requires_grad_()
        w = matching_loss(e, t, weighting)  # type: ignore[arg-type]
        for clip in (1e-9, 1e9):
            losses, stops = awm_loss(w, w.detach(), a, clip)
            for k in range(2):
                (found,) = torch.autograd.grad(losses[:, k].sum(), e, retain_graph=True)
                torch.testing.assert_close(found, a[:, k] * slope(e.detach()))
            assert not stops.any()
    zero = torch.zeros(1, dtype=torch.float64)
    assert all(matching_loss(zero, zero + 1, w) == 0 for w in ("uniform", "huber", "ghuber"))  # type: ignore[arg-type]


def test_awms_huber_on_policy_is_nft_by_a_constant_for_gaussian_residuals() -> None:
    """mean |x| = sqrt(2 / pi) sqrt(mean x^2), so a step of AWM is 0.399 of NFT's, over A_max."""
    x0, eps, t = draw(8, 4096), draw(8, 4096, seed=1), draw(8, seed=2).sigmoid()
    v, a = (
        (eps - x0 + draw(8, 4096, seed=3) * draw(8, 1, seed=4).exp()).requires_grad_(),
        draw(8, 1, seed=5).clamp(-4, 4),
    )
    x_t = (1 - t[:, None]) * x0 + t[:, None] * eps
    x0_theta = x_t - t[:, None] * v
    nft = nft_loss(contrastive_losses(x0, x0_theta, x0_theta.detach(), 0.3), a, 5.0, 0.3)
    w = matching_loss((v - (eps - x0)).square().mean(1), t, "huber")
    ours, _ = awm_loss(w, w.detach(), a / 5.0, 1.0)
    (one,), (other,) = (torch.autograd.grad(losses.sum(), v, retain_graph=True) for losses in (ours, nft))
    ratio = 5.0 * one.norm(dim=1) / other.norm(dim=1)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5 * math.sqrt(2 / math.pi)), rtol=0.03, atol=0)
    assert torch.cosine_similarity(one, other, dim=1).min() > 1 - 1e-9


def test_awms_clip_stops_what_moved_outward_and_only_that() -> None:
    old = torch.zeros(4, dtype=torch.float64)
    w = torch.tensor([-0.2, 0.2, -0.2, 0.2], dtype=torch.float64).requires_grad_()  # r = 1.22, 0.82, ..
    a = torch.tensor([1.0, 1, -1, -1], dtype=torch.float64)[:, None]
    losses, stops = awm_loss(w, old, a, 0.1)
    (slope,) = torch.autograd.grad(losses.sum(), w)
    assert stops[:, 0].tolist() == [True, False, False, True] and (slope != 0).tolist() == [False, True, True, False]
    free, _ = awm_loss(w, old, a, 1e9)
    (slope,) = torch.autograd.grad(free.sum(), w)
    torch.testing.assert_close(slope, a[:, 0] * (-w.detach()).exp())  # A r: it halves when W has grown by log 2


# ---- DGPO


def test_dgpo_slopes_are_the_gradient_of_the_papers_loss_over_b() -> None:
    d, b, group = draw(3, 5, 2).requires_grad_(), 7.0, 5
    a = draw(3, 5, 2, seed=1)
    a = a - a.mean(1, keepdim=True)
    slopes, preference = group_slopes(d.detach(), a, b)
    for k in range(2):
        loss = -logsigmoid(-(b / group) * (a[:, :, None, k] * d).sum(1)).sum()
        (want,) = torch.autograd.grad(loss, d)
        torch.testing.assert_close(b / group * slopes[..., k], want)
    moved, _ = group_slopes(d.detach() + draw(3, 1, 2, seed=2), a, b)
    torch.testing.assert_close(moved, slopes)  # what is common to a group's errors changes nothing
    at_reference, _ = group_slopes(torch.zeros_like(d), a, b)
    torch.testing.assert_close(at_reference, (a / 2)[:, :, None].expand_as(slopes))
    won, _ = group_slopes(-1e3 * a[..., :1], a, b)  # the good are far better than under the reference already
    assert won[..., 0].abs().max() < 1e-12
    assert group_slopes(d.detach(), torch.zeros_like(a), b)[1].eq(0).all() and preference.shape == (3, 2, 2)


def test_dgpo_of_two_images_is_dpo() -> None:
    d, b = draw(4, 2, 3), 5.0
    a = torch.tensor([1.0, -1.0], dtype=torch.float64).expand(4, 2)[..., None]
    dpo, _ = pair_slopes(d.flatten(0, 1), a.flatten(0, 1), 4, b)
    torch.testing.assert_close(b / 2 * group_slopes(d, a, b)[0], dpo.unflatten(0, (4, 2)))


def test_dgpos_clip_is_one_sided() -> None:
    moved = torch.tensor([-0.2, 0.2, -0.2, 0.2, 0.0, -0.2], dtype=torch.float64)[None, :, None]
    a = torch.tensor([1.0, 1, -1, -1, 1, 0], dtype=torch.float64)[None, :, None]
    assert stopped(moved, a, 0.1).flatten().tolist() == [True, False, False, True, False, False]
    assert not stopped(moved, a, math.inf).any()


# ---- FDFO


def test_fdfos_ratio_is_that_of_two_surrogates_and_its_slope_moves_velocities_against_dx() -> None:
    """r = exp(p(v) - p(v_old)), p(v) = -mean (v - (v_old - g))^2 written out; at v_old dL/dv = 2 A g / D."""
    dims = 12
    old, difference, a = draw(5, 3, 2, 2), draw(5, 3, 2, 2, seed=1), draw(5, 2, seed=2)
    move = 0.1 * draw(5, 3, 2, 2, seed=3)
    g = difference / difference.square().flatten(1).mean(1).view(-1, 1, 1, 1)

    def p(v: Tensor) -> Tensor:
        return -(v - (old - g)).square().flatten(1).mean(1)

    torch.testing.assert_close(log_ratio(move, difference), p(old + move) - p(old))
    leaf = torch.zeros_like(move).requires_grad_()
    for k in range(2):
        (slope,) = torch.autograd.grad(fdfo_loss(log_ratio(leaf, difference), a, 0.03)[:, k].sum(), leaf)
        torch.testing.assert_close(slope, 2 * a[:, k].view(-1, 1, 1, 1) * g / dims)
    (one,) = torch.autograd.grad(fdfo_loss(log_ratio(leaf, difference), a, 0.03).sum(), leaf)
    (other,) = torch.autograd.grad(fdfo_loss(log_ratio(leaf, -difference), -a, 0.03).sum(), leaf)
    torch.testing.assert_close(one, other)  # the partner says the same
    assert not fdfo_loss(log_ratio(move, difference), torch.zeros_like(a), 0.03).any(), "rewards that agree say nothing"
    still = torch.zeros_like(difference)
    assert not log_ratio(move, still).any(), "neither do images that do"
    assert not torch.autograd.grad(fdfo_loss(log_ratio(leaf, still), a, 0.03).sum(), leaf)[0].any()


def test_fdfo_ends_half_of_epsilon_of_dx_away_whatever_the_reward() -> None:
    """L(r) is least at r = 1 + eps sign A: along g a move of rms about eps / 2 rms(dx)."""
    epsilon, difference = 0.03, 0.2 * draw(4, 3, 4, 4)
    a = torch.tensor([1e-3, 1.0, -50.0, -0.1], dtype=torch.float64)[:, None]
    move = torch.zeros_like(difference).requires_grad_()
    curvature = 4 * a.squeeze().abs() / (epsilon * 48 * difference.square().flatten(1).mean(1))
    for _ in range(60):
        (slope,) = torch.autograd.grad(fdfo_loss(log_ratio(move, difference), a, epsilon).sum(), move)
        move = (move - 0.5 * slope / curvature.view(-1, 1, 1, 1)).detach().requires_grad_()
    r = log_ratio(move, difference).exp().detach()
    torch.testing.assert_close(r, 1 + epsilon * a.squeeze().sign(), rtol=0, atol=1e-6)
    size, full = (x.detach().square().flatten(1).mean(1).sqrt() for x in (move, difference))
    torch.testing.assert_close(size / full, torch.full_like(size, epsilon / 2), rtol=0.05, atol=0)
    towards = -(move.detach() * difference).flatten(1).sum(1).sign()
    assert towards.tolist() == a.squeeze().sign().tolist(), "less velocity along dx makes the image more like it"


def test_fdfos_differences_average_to_the_rewards_gradient() -> None:
    """A linear reward and isotropic dx: D times the mean of dR dx / |dx|^2 is grad R; pairs' cosine is as expected."""
    d, pairs = 64, 40_000
    gradient, dx = draw(d, seed=1), draw(pairs, d)
    found = d * ((dx @ gradient)[:, None] * dx / dx.square().sum(1, keepdim=True)).mean(0)
    torch.testing.assert_close(found, gradient, rtol=0, atol=6 * float(gradient.norm()) / math.sqrt(pairs))
    few = [((dx[i : i + 64] @ gradient)[:, None] * dx[i : i + 64]).mean(0) for i in range(0, 6400, 64)]
    cosine = torch.stack([torch.cosine_similarity(one, gradient, dim=0) for one in few]).mean()
    assert float(cosine) == pytest.approx(1 / math.sqrt(1 + d / 64), abs=0.03)


# ---- PRDP


def listing(ratio: Tensor, old: Tensor, r: Tensor, clip: float) -> Tensor:
    """All pairs with r_i > r_j of one group, as the paper's listing goes through them."""
    low = old.new_full((), clip)
    plain, held = ratio.mean(1), ratio.clamp(old - low, old + low).mean(1)
    terms = [
        torch.maximum((plain[i] - plain[j] - r[i] + r[j]) ** 2, (held[i] - held[j] - r[i] + r[j]) ** 2)
        for i in range(len(r))
        for j in range(len(r))
        if r[i] > r[j]
    ]
    return torch.stack(terms).mean()


def test_prdp_is_the_papers_listing() -> None:
    ratio, old, r = draw(3, 5, 4).requires_grad_(), draw(3, 5, 4, seed=1), draw(3, 5, seed=2)
    for clip in (0.5, 100.0):
        ours, theirs = (
            prdp_loss(ratio, old, r[..., None], clip),
            [listing(ratio[i], old[i], r[i], clip) for i in range(3)],
        )
        torch.testing.assert_close(ours[:, 0], torch.stack(theirs))
        (gradient,) = torch.autograd.grad(ours.sum(), ratio, retain_graph=True)
        (want,) = torch.autograd.grad(sum(theirs), ratio, retain_graph=True)
        torch.testing.assert_close(gradient, want)


def test_without_the_clip_pairs_are_centring_and_the_optimum_has_loss_zero() -> None:
    ratio, r = draw(1, 6, 3), draw(1, 6, seed=2)
    d = (ratio.mean(2) - r)[0]
    torch.testing.assert_close(prdp_loss(ratio, ratio, r[..., None], 9.0)[0, 0], 2 * (d - d.mean()).square().sum() / 5)
    # p_theta = N(b-tilted mean, 1) of p_ref = N(0, 1) under R(x) = x: log-ratio = x / b - const exactly
    x, b = draw(1, 6, 1, seed=3), 2.0
    optimum = (x / b) - 1 / (2 * b**2)
    torch.testing.assert_close(
        prdp_loss(optimum, optimum, x / b, 1e-4), torch.zeros(1, 1, dtype=torch.float64), atol=1e-12, rtol=0
    )


# ---- credit over the steps


def scored(views: Tensor, group: int) -> ScoredBatch:
    n = len(views)
    return ScoredBatch(
        views[:, -1], torch.ones(views.shape[2]), torch.arange(n) // group, torch.zeros(n, 2), torch.zeros(n, 0), views
    )


def test_gains_telescope_and_a_common_start_cancels() -> None:
    views = draw(8, 4, 2)
    gains = gains_of(views, common=False)
    torch.testing.assert_close(gains.sum(1), views[:, -1] - views[:, 0])
    views[:4, 0], views[4:, 0] = views[0, 0].clone(), views[4, 0].clone()  # one start for each group of four
    rule = AdvantageRule("group")
    whole = Dense(common=False).advantages(rule, scored(views, 4))
    left_out = Dense(common=True).advantages(rule, scored(views[:, 1:], 4))
    torch.testing.assert_close(left_out, whole)
    assert whole.shape == (8, 3, 1)
    each = views.sum(2).diff(dim=1)[:4, 1]
    torch.testing.assert_close(whole[:4, 1, 0], (each - each.mean()) / (each.std(correction=0) + 1e-4))


def test_only_the_last_step_gains_then_it_alone_has_the_plain_advantage() -> None:
    views = torch.zeros(4, 4, 1, dtype=torch.float64)
    views[:, -1] = draw(4, 1)
    found = Dense(common=False).advantages(AdvantageRule("group"), scored(views, 4))
    assert not found[:, :2].any()
    torch.testing.assert_close(found[:, 2], AdvantageRule("group")(scored(views, 4)))


def test_dense_credit_lowers_the_variance_of_the_policy_gradient() -> None:
    """1-D Gaussian data with the exact velocity, R(x) = x: a step's score times its own gain varies less."""
    n, steps, a = 20_000, 10, 0.7
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()

    def v(x: Tensor, t: float) -> Tensor:  # of N(0, 1) data: x0 = (1 - t) x / ((1 - t)^2 + t^2)
        x0 = (1 - t) * x / ((1 - t) ** 2 + t**2)
        return (x - x0) / t

    def ode(x: Tensor, i: int) -> Tensor:
        for t, t_next in zip(levels[i:], levels[i + 1 :], strict=False):
            x = x + (t_next - t) * v(x, t)
        return x

    x, rewards, noises = draw(1).expand(n), [], []
    rewards.append(ode(x, 0))
    for i in range(steps):
        t, dt = levels[i], levels[i + 1] - levels[i]
        s = a * math.sqrt(t / (1 - (levels[1] if t == 1 else t)))
        k = s**2 / (2 * t)
        noise = draw(n, seed=i + 1)
        x = x * (1 + k * dt) + v(x, t) * (1 + k * (1 - t)) * dt + s * math.sqrt(-dt) * noise
        noises.append(noise)
        rewards.append(ode(x, i + 1))
    views = torch.stack(rewards, 1)
    gains = views.diff(dim=1)
    ratios = []  # of the variances, for gradients of one mean
    for i in range(steps - 1):  # the last step's gain is nearly the terminal reward's own noise
        score = noises[i]  # d log p / d mean, in units of the step's std
        dense = score * (gains[:, i] - gains[:, i].mean()) / gains[:, i].std()
        sparse = score * (views[:, -1] - views[:, -1].mean()) / gains[:, i].std()
        assert dense.mean() > 0
        ratios.append(float(sparse.var() / sparse.mean() ** 2 / (dense.var() / dense.mean() ** 2)))
        correlation = torch.corrcoef(torch.stack([views[:, -1], gains[:, i]]))[0, 1]
        assert correlation < 0.6
    assert min(ratios) > 1 and sum(ratios) / len(ratios) > 3


def test_calibration_balances_gains() -> None:
    gains = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [2.0, 1.0], [-2.0, 1.0], [0.0, 1.0]])  # 0 is no gain and no loss
    assert calibrated([0.5, 0.5], gains, 2, 0.01, 1.0) == pytest.approx([0.51, 0.49])
    assert calibrated([1.0, 0.01], gains, 2, 0.01, 1.0) == pytest.approx([1.0, 0.01])  # within its limits
    mostly_none = torch.tensor([[1.0], [-1.0], *[[0.0]] * 40])
    assert calibrated([0.5], mostly_none, 2, 0.01, 1.0) == pytest.approx([0.51])


@pytest.mark.parametrize("images", [24, 384, 1152])
def test_calibration_tells_balanced_from_biased_gains_of_many_images(images: int) -> None:
    """Twenty rounds: what gains by a fair coin gets more noise, what wins or loses 70 times of 100 gets less."""
    source, levels, start, rounds = torch.Generator().manual_seed(0), [0.7] * 6, 0.7, 20
    share = torch.tensor([0.5, 0.5, 0.5, 0.3, 0.7, 0.3] if images > 24 else [0.5, 0.5, 0.5, 0.1, 0.9, 0.1])
    for _ in range(rounds):
        gains = (torch.rand(images, 6, generator=source) < share).double() - 0.5
        levels = calibrated(levels, gains, 2.0, 0.01, 5.0)
    assert min(levels[:3]) > start + 0.7 * rounds * 0.01
    assert max(levels[3:]) < start - 0.7 * rounds * 0.01


def test_granularities_are_normalised_by_themselves_and_summed() -> None:
    views = draw(8, 4, 1)  # 2 steps x 2 strides
    credit = Branching(group=4, steps=(0, 1), seeds=2, strides=(1, 2), scope="group")
    found = credit.advantages(AdvantageRule("group"), scored(views, 4))
    assert found.shape == (8, 2, 1)
    own = views[:4, 2:, 0]
    want = ((own - own.mean(0)) / (own.std(0, correction=0) + 1e-4)).sum(1)
    torch.testing.assert_close(found[:4, 1, 0], want)
    by_seed = Branching(group=4, steps=(0, 1), seeds=2, strides=(1, 2), scope="seed")
    apart = by_seed.advantages(AdvantageRule("group"), scored(views, 4))
    pair = views[2:4, 0, 0]
    one = (pair - pair.mean()) / (pair.std(correction=0) + 1e-4)
    two = views[2:4, 1, 0]
    torch.testing.assert_close(apart[2:4, 0, 0], one + (two - two.mean()) / (two.std(correction=0) + 1e-4))


def test_seed_groups_are_apart_for_any_size() -> None:
    """Three prompts of six images from three seeds: members 0 and 1, 2 and 3, 4 and 5 are compared with each other."""
    views = torch.rand(18, 1, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    credit = Branching(group=6, steps=(0,), seeds=3, strides=(1,), scope="seed")
    found = credit.advantages(AdvantageRule("none"), scored(views, 6))[:, 0, 0]
    pairs = views.view(9, 2)
    torch.testing.assert_close(found, (pairs - pairs.mean(1, keepdim=True)).flatten())


def test_a_tree_of_depth_two_by_hand() -> None:
    scores = torch.tensor([1.0, 3.0, 0.0, 4.0], dtype=torch.float64).view(4, 1, 1)
    tree = Branched(group=4, splits=(0, 2), branch=2, steps=3)
    found = tree.advantages(AdvantageRule("group"), scored(scores, 4))[..., 0]
    assert found[:, :2].abs().max() == 0  # both nodes of depth 1 are worth 2
    leaves = scores.flatten()
    torch.testing.assert_close(found[:, 2], (leaves - leaves.mean()) / (leaves.std(correction=0) + 1e-4))
    other = torch.tensor([1.0, 3.0, 4.0, 4.0], dtype=torch.float64).view(4, 1, 1)
    found = tree.advantages(AdvantageRule("group"), scored(other, 4))[..., 0]
    torch.testing.assert_close(found[:, 0], torch.tensor([-1.0, -1, 1, 1], dtype=torch.float64) / 1.0001)


def test_edges_are_trained_once() -> None:
    class Made:
        member, first = torch.arange(4), 0

    def pairs(tree: Branched) -> list[list[int]]:
        scores = torch.tensor([1.0, 3.0, 0.0, 4.0]).view(4, 1, 1)
        advantages = tree.advantages(AdvantageRule("group"), scored(scores, 4))
        return tree.pairs(Made(), advantages, torch.arange(4), 0).tolist()  # type: ignore[arg-type]

    plain = {"group": 4, "splits": (0, 2), "branch": 2}
    edges = [[0, 0], [2, 0], [0, 1], [2, 1], [0, 2], [1, 2], [2, 2], [3, 2]]
    assert pairs(Branched(**plain, steps=3)) == edges
    assert pairs(Branched(**plain, steps=6)) == [*edges, *([sample, step] for step in (3, 4, 5) for sample in range(4))]


def test_softmax_weights_are_the_papers_over_the_known_scores_of_a_group() -> None:
    scores = torch.tensor([[0.3, 1.7], [0.9, NAN], [0.5, 0.2], [0.8, NAN], [0.1, NAN]], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1])
    found = reward_weights(scores, groups, weights="softmax", tau=0.4)
    for k, own in ((0, [0, 1, 2]), (0, [3, 4]), (1, [0, 2])):
        powers = [math.exp(float(scores[i, k]) / 0.4) for i in own]
        for i, power in zip(own, powers, strict=True):
            assert float(found[i, k]) == pytest.approx(len(own) * power / sum(powers), rel=1e-12)
    assert found[scores.isnan()].eq(0).all()  # also in a group to which the reward does not apply at all


def test_a_dense_sample_has_a_row_for_each_of_its_steps() -> None:
    rollout: Any = SimpleNamespace(trajectory=SimpleNamespace(t=torch.zeros(5, 3)))
    assert Dense(common=False).rows_per_sample(rollout) == 3
