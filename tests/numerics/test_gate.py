"""GARDO's numbers against literal transcriptions of methods section 3: pairwise, in float64, without vectorisation."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffrl.methods.gardo.gate import (
    GateShare,
    gate_of,
    nearest_distance,
    shape_advantages,
    uncertainty,
    win_rates,
)
from diffrl.methods.gardo.penalty import Gardo
from diffrl.methods.nft.objective import NFT
from diffrl.objectives.advantages import ScoredBatch


def brute_win_rates(scores: torch.Tensor) -> torch.Tensor:
    """O(N^2): for every pair, a win counts 1 and a tie 1/2."""
    rates = torch.full(scores.shape, math.nan, dtype=torch.float64)
    for k in range(scores.shape[1]):
        known = [i for i in range(len(scores)) if not math.isnan(scores[i, k])]
        for i in known:
            wins = 0.0
            for j in known:
                if j != i:
                    wins += 1.0 if scores[j, k] < scores[i, k] else 0.5 if scores[j, k] == scores[i, k] else 0.0
            rates[i, k] = wins / (len(known) - 1) if len(known) > 1 else 0.5
    return rates


def brute_gate(u: list[float], share: float) -> list[bool]:
    """Above the value at position (1 - share) (n - 1) of the sorted list, interpolated."""
    ordered = sorted(u)
    place = (1 - share) * (len(u) - 1)
    low, part = math.floor(place), place - math.floor(place)
    threshold = ordered[low] + part * (ordered[min(low + 1, len(u) - 1)] - ordered[low])
    return [value > threshold for value in u]


@pytest.fixture
def scores() -> torch.Tensor:
    """(60, 3) with many ties, some NaN, and one column of which one score is known."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 8, (60, 3), generator=generator) / 7
    values[:, 1] = torch.randn(60, generator=generator)
    values[torch.rand(60, 3, generator=generator) < 0.2] = math.nan
    values[1:, 2] = math.nan
    values[0, 2] = 3.0
    return values


def test_win_rates_are_the_pairwise_ones(scores) -> None:
    ours, theirs = win_rates(scores), brute_win_rates(scores)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.allclose(ours.nan_to_num(-1), theirs.nan_to_num(-1), rtol=0, atol=1e-15)
    assert ours[:, 0].nanmean() == pytest.approx(0.5) and ours[:, 1].nanmean() == pytest.approx(0.5)


def test_uncertainty_is_the_proxys_win_rate_less_the_mean_of_the_others(scores) -> None:
    proxy, auxiliary = scores[:, 0], scores[:, 1:]
    u = uncertainty(proxy, auxiliary)
    w, others = brute_win_rates(proxy[:, None])[:, 0], brute_win_rates(auxiliary)
    for i in range(len(u)):
        known = [float(x) for x in others[i] if not math.isnan(x)]
        expected = float(w[i]) - sum(known) / len(known) if known else math.nan
        assert float(u[i]) == pytest.approx(expected, abs=1e-15, nan_ok=True)


def test_uncertainty_has_the_mean_zero_so_only_its_upper_half_can_move_a_window() -> None:
    values = torch.rand(40, 3, generator=torch.Generator().manual_seed(1))
    assert float(uncertainty(values[:, 0], values[:, 1:]).mean()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("transform", [torch.exp, lambda x: x**3, lambda x: 100 * x - 7, torch.atan])
def test_uncertainty_does_not_change_under_increasing_transforms(transform) -> None:
    values = torch.randn(50, 3, generator=torch.Generator().manual_seed(2)).double()
    values[10:20] = values[:10]  # ties stay ties
    u = uncertainty(values[:, 0], values[:, 1:])
    assert torch.equal(uncertainty(transform(values[:, 0]), values[:, 1:]), u)
    assert torch.equal(uncertainty(values[:, 0], transform(values[:, 1:])), u)
    assert not torch.equal(uncertainty(-values[:, 0], values[:, 1:]), u)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.5])
def test_gate_takes_the_highest_share_of_the_upper_half_or_of_each_group(share: float, ties: bool) -> None:
    """Of different values those above the quantile; of equal ones as many, and only those at the limit by lot."""
    generator = torch.Generator().manual_seed(3)
    u = torch.rand(96, generator=generator).double() * 2 - 1
    u[5] = math.nan
    jittered, u = u, (u * 20).round() / 20 if ties else u
    groups = torch.arange(96) % 4
    pools = [groups == group for group in range(4)]
    for gate, parts in ((gate_of(u, share), [u >= 0]), (gate_of(u, share, groups), pools)):
        for part in parts:
            rows = (part & ~u.isnan()).nonzero().flatten()
            number = sum(brute_gate(jittered[rows].tolist(), share))
            assert int(gate[rows].sum()) == number > 0
            low, high = u[rows][gate[rows]].min(), u[rows][~gate[rows]].max() if number < len(rows) else -1.0
            assert low >= high if ties else low > high
        assert not gate[5]
    assert not gate_of(u, share)[~(u >= 0)].any()


def test_gate_counts_and_edges() -> None:
    u = torch.linspace(0.0, 1.0, 101).double()
    assert gate_of(u, 0.1).nonzero().flatten().tolist() == list(range(91, 101))
    assert gate_of(u, 1.0).sum() == 100  # the quantile is itself not above
    assert not gate_of(torch.zeros(9), 0.5).any()  # nobody is more uncertain than the others, and nobody is at all
    assert not gate_of(torch.tensor([-0.5, -0.1, math.nan]), 0.5).any()
    assert gate_of(torch.tensor([-0.5, 0.7, -0.1]), 0.1).tolist() == [False, True, False]  # the only one with U >= 0
    assert gate_of(torch.tensor([0.0, 0.5, 0.0, 0.0]), 0.9).tolist() == [False, True, False, False]  # 0 is not drawn


@pytest.mark.parametrize("hacked", [4, 24, 48])
def test_gate_takes_its_share_of_a_class_that_ties_at_the_highest_u(hacked: int) -> None:
    """0/1 rewards: the proxy is fooled by `hacked` of 96 images, which all have one U. Who is drawn hangs on names."""
    right = torch.arange(96) % 4 == 0
    proxy = (right | (torch.arange(96) >= 96 - hacked)).double()
    u = uncertainty(proxy, right.double()[:, None])
    suspects = (u == u.max()) & (u > 0)
    count = sum(brute_gate(torch.rand(int((u >= 0).sum())).tolist(), 0.1))
    names = [(0, 1, f"prompt {i // 12}", i % 12) for i in range(96)]
    gate = gate_of(u, 0.1, None, names)
    assert int(gate.sum()) == count > 0 and bool(gate[suspects].any()) and not gate[u <= 0].any()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gate_of(u[order], 0.1, None, [names[i] for i in order]), gate[order])
    drawn = [gate_of(u, 0.1, None, [(0, epoch, *name[2:]) for name in names]) for epoch in range(64)]
    often = torch.stack(drawn).double().mean(0)[suspects]
    assert often.mean() == pytest.approx(min(count / int(suspects.sum()), 1.0)) and (often > 0).all()  # nobody is safe


def test_distance_and_shaping_are_the_papers() -> None:
    generator = torch.Generator().manual_seed(4)
    features, groups = torch.randn(24, 7, generator=generator), torch.arange(24) // 6
    advantages = torch.randn(24, 2, generator=generator)
    d = nearest_distance(features, groups)
    e = features.double() / features.double().norm(dim=1, keepdim=True)
    for i in range(24):
        others = [1 - float(e[i] @ e[j]) for j in range(24) if j != i and groups[j] == groups[i]]
        assert float(d[i]) == pytest.approx(min(others), abs=1e-12)
    raw, mean = (shape_advantages(advantages, d, groups, kind) for kind in ("raw", "group_mean"))
    for i in range(24):
        over = float(d[i]) / (sum(float(d[j]) for j in range(24) if groups[j] == groups[i]) / 6)
        for k in range(2):
            a = float(advantages[i, k])
            assert float(raw[i, k]) == pytest.approx(a * float(d[i]) if a > 0 else a, rel=1e-6)
            assert float(mean[i, k]) == pytest.approx(a * over if a > 0 else a, rel=1e-6)
    assert shape_advantages(advantages, d, groups, "off") is advantages


def test_shaping_keeps_a_group_whose_images_are_all_alike() -> None:
    features, groups = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]])
    d = nearest_distance(features, groups)
    assert torch.equal(shape_advantages(advantages, d, groups, "group_mean"), advantages)
    assert torch.equal(shape_advantages(advantages, d, groups, "raw"), advantages.clamp(max=0))


def test_share_follows_the_window_as_the_authors_code_does() -> None:
    generator = torch.Generator().manual_seed(5)
    means = (torch.rand(200, generator=generator) * torch.linspace(0.2, 2, 200)).tolist()
    means += (torch.rand(60, generator=generator) * torch.linspace(0.5, 0.01, 60)).tolist()
    share, k, window = GateShare(), 0.1, []
    values = []
    for mean in means:
        if window:
            if mean > max(window):
                k *= 1.1
            elif mean < min(window):
                k *= 0.9
        k = min(max(k, 0.02), 0.2)
        window = [*window, mean][-20:]
        share.follow(mean)
        assert share.value == pytest.approx(k, rel=1e-12)
        values.append(share.value)
    assert max(values) == 0.2 and min(values) < 0.1 and len(share.means) == 20


def test_share_stays_where_an_epoch_only_reaches_the_window_limits() -> None:
    """Above all of them it grows, below all of them it shrinks: a mean that equals one of them moves nothing."""
    share = GateShare()
    for mean in (0.3, 0.3, 0.3):
        share.follow(mean)
    assert share.value == 0.1


def judged_by(gate: str, auxiliary: list[str], lower: tuple[str, ...] = ()) -> tuple[Gardo, ScoredBatch]:
    gardo = Gardo(NFT(), auxiliary=auxiliary, lower=lower, gate=gate, diversity="off", share=0.2)  # type: ignore[arg-type]
    draw = torch.rand(12, 1 + len(auxiliary), generator=torch.Generator().manual_seed(2))
    features = torch.ones(12, 3)
    return gardo, ScoredBatch(draw[:, :1], torch.ones(1), torch.arange(12) // 4, features, draw[:, 1:])


def test_uncertainty_is_of_the_auxiliary_scores_as_they_are_and_of_the_negative_where_lower_is_better() -> None:
    gardo, scored = judged_by("batch", ["up", "down"], ("down",))
    gardo.see_epoch(scored)
    assert gardo.judged is not None
    auxiliary = torch.stack([scored.auxiliary[:, 0], -scored.auxiliary[:, 1]], dim=1)
    assert torch.equal(gardo.judged.u, uncertainty(scored.scores[:, 0], auxiliary))
    assert torch.equal(gardo.judged.gate, gate_of(gardo.judged.u, gardo.gate_share.value))


def test_without_auxiliary_rewards_there_is_no_gate_to_judge_by() -> None:
    gardo, scored = judged_by("all", [])
    gardo.see_epoch(scored)
    assert gardo.judged is None
    gardo, scored = judged_by("batch", [])
    with pytest.raises(AssertionError, match="a gate needs auxiliary rewards"):
        gardo.see_epoch(scored)


@pytest.mark.parametrize(
    ("total", "due"), [((0.3, 4.0), False), ((0.5, 4.0), True), ((0.15, 1.0), True), ((0.0, 0.0), False)]
)
def test_the_reference_is_reset_by_the_mean_over_the_penalised_rows(total: tuple[float, float], due: bool) -> None:
    gardo = Gardo(NFT(), auxiliary=["a"], reset_kl=0.1, reset_steps=None)
    followed: list[tuple[str, float]] = []
    policy: Any = SimpleNamespace(
        device=torch.device("cpu"), ema_update=lambda name, keep: followed.append((name, float(keep)))
    )
    gardo.gated.kl = torch.tensor(total)
    gardo._reset(policy)
    assert followed == [("reference", 0.0 if due else 1.0)]


@pytest.mark.parametrize(("here", "there", "due"), [(0.3, 0.0, False), (0.0, 0.6, True), (0.3, 0.2, True)])
def test_a_reset_is_of_all_processes(here: float, there: float, due: bool) -> None:
    """The KL's sum over 2 penalised rows of this process and 2 of another one, whose mean has a limit of 0.1: decided
    by its own, one process would renew its reference and the other keep it."""
    gardo = Gardo(NFT(), auxiliary=["a"], reset_kl=0.1, reset_steps=None)
    followed: list[float] = []
    policy: Any = SimpleNamespace(
        device=torch.device("cpu"), ema_update=lambda name, keep: followed.append(float(keep))
    )
    step: Any = SimpleNamespace(parts=[], reduce=lambda total: total + torch.tensor([there, 2.0]))
    gardo.gated.gated = False  # no rows are asked for
    gardo.before_step(policy, step)
    gardo.gated.kl = torch.tensor([here, 2.0])
    gardo.after_step(policy, 1)
    assert followed == [0.0 if due else 1.0]
