"""What groups that agree give: each estimate against its formula in float64, and where it is the plain one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffrl.advantages import Estimator, agreement_entropy, beta_density, group_advantages, risk_utility

NAN = math.nan
GROUPS = torch.arange(24) // 4


def scores(binary: bool = False) -> Tensor:
    draw = torch.rand(24, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if binary:
        draw = (draw > torch.tensor([0.2, 0.7], dtype=torch.float64)).double()
    draw[0:4, 0], draw[20, 0] = 0.5, NAN  # a group that agrees, and a score that does not apply
    return draw


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_the_default_is_the_plain_one_to_the_bit(std: str) -> None:
    assert torch.equal(Estimator()(scores(), GROUPS, std), group_advantages(scores(), GROUPS, std))  # type: ignore[arg-type]


def test_groups_that_agree_are_left_out_and_the_mean_is_over_the_others() -> None:
    values = scores()
    found, plain = Estimator("leave_out", least=0.01)(values, GROUPS), group_advantages(values, GROUPS)
    assert not found[:4, 0].any()
    torch.testing.assert_close(found[4:, 0], plain[4:, 0] * 23 / 19)  # 23 scores, 19 of them in groups with a spread
    torch.testing.assert_close(found[:, 1], plain[:, 1])
    assert not Estimator("leave_out", least=9.0)(values, GROUPS).any()


def test_a_least_std_keeps_rounding_from_being_blown_up() -> None:
    values = scores()
    values[0, 0] += 1e-3
    found = Estimator("floor", least=0.1)(values, GROUPS)
    assert 0 < float(found[0, 0]) < 0.01 < 1 < float(group_advantages(values, GROUPS)[0, 0])
    wide = values[4:8, 1]
    torch.testing.assert_close(found[4:8, 1], (wide - wide.mean()) / wide.std(correction=0))


def test_a_virtual_best_member_pushes_away_from_a_group_that_is_wrong_altogether() -> None:
    values = torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1], dtype=torch.float64)[:, None]
    found = Estimator("virtual", top=1.0)(values, torch.arange(12) // 4)[:, 0]
    joined = torch.tensor([0.0, 0, 0, 0, 1], dtype=torch.float64)
    torch.testing.assert_close(found[:4], ((joined - joined.mean()) / (joined.std(correction=0) + 1e-4))[:4])
    assert (found[:4] < 0).all() and not found[4:8].abs().max() > 1e-9  # all right: nothing to learn
    mixed = torch.tensor([0.0, 0, 0, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(found[8:], ((mixed - mixed.mean()) / (mixed.std(correction=0) + 1e-4))[:4])
    gap = values.clone()
    gap[0] = NAN  # not applicable: neither counted nor given an advantage
    again = Estimator("virtual")(gap, torch.arange(12) // 4)[:, 0]
    four = joined[1:]
    assert again[0] == 0
    torch.testing.assert_close(again[1:4], ((four - four.mean()) / (four.std(correction=0) + 1e-4))[:3])


def test_a_virtual_best_member_with_the_epochs_std() -> None:
    """std "batch": the mean variance of the groups, each with its virtual member, over the samples that are known."""
    values = torch.tensor([0.0, 0.5, 0.25, NAN, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)[:, None]
    found = Estimator("virtual", top=1.0)(values, torch.arange(8) // 4, "batch")[:, 0]
    first, second = (torch.tensor(own, dtype=torch.float64) for own in ([0.0, 0.5, 0.25, 1], [0.0, 1, 1, 0, 1]))
    scale = ((3 * first.var(correction=0) + 4 * second.var(correction=0)) / 7).sqrt() + 1e-4
    expected = torch.cat([(first - first.mean())[:3], torch.zeros(1), (second - second.mean())[:4]])
    torch.testing.assert_close(found, expected.where(expected == 0, expected / scale))


def test_only_leaving_out_makes_up_for_what_is_silent() -> None:
    values = torch.tensor([1.0, 1, 0.9, 1, 0, 0, 0, 1], dtype=torch.float64)[:, None]
    groups, plain = torch.arange(8) // 4, Estimator("virtual", top=1.0)
    banned = Estimator("virtual", top=1.0, ban=(0.1, 0.9))(values, groups)
    assert not banned[:4].any()  # saturated: hardly a spread, and a high mean
    assert torch.equal(banned[4:], plain(values, groups)[4:])


def test_the_entropy_goes_on_after_a_reward_that_only_one_of_a_group_has() -> None:
    values = torch.tensor([[NAN, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    found = agreement_entropy(values, torch.tensor([0, 0, 1, 1]), 0.01)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]).double())


def test_blending_takes_the_groups_rank_where_its_members_agree() -> None:
    values = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0, 0.1, 0.4, 0.7, 1.0], dtype=torch.float64)[:, None]
    groups = torch.arange(12) // 4
    entropy = agreement_entropy(values, groups, 0.01)[:, 0]
    assert entropy.tolist() == pytest.approx([0.0] * 8 + [1.0] * 4)
    assert agreement_entropy(torch.tensor([[0.0], [0], [1], [1]]), torch.zeros(4, dtype=torch.int64), 0.01)[
        0, 0
    ] == pytest.approx(0.5)
    found = Estimator("blend")(values, groups)[:, 0]
    means = torch.tensor([1.0, 0.0, 0.55], dtype=torch.float64)
    rank = (means - means.mean()) / (means.std(correction=0) + 1e-4)
    torch.testing.assert_close(found[:8], rank[:2].repeat_interleave(4))
    torch.testing.assert_close(found[8:], group_advantages(values, groups)[8:, 0])  # all differ: the plain one


def test_the_beta_density_makes_the_variance_least() -> None:
    """With p ~ Beta(a, b) and R in {0, 1} the second moment of p (1 - p) / f^2 is least at 1 + a / 3, 1 + b / 3."""
    a, b = 2.0, 5.0
    p = torch.linspace(0, 1, 200_001, dtype=torch.float64)[1:-1]

    def pdf(x: float, y: float) -> Tensor:
        norm = math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)
        return ((x - 1) * p.log() + (y - 1) * (1 - p).log() - norm).exp()

    def moment(x: float, y: float) -> float:
        return float((pdf(a, b) * p * (1 - p) / pdf(x, y) ** 2).mean())

    best = moment(1 + a / 3, 1 + b / 3)
    assert all(moment(1 + a / 3 + i, 1 + b / 3 + j) > best for i in (-0.1, 0, 0.1) for j in (-0.1, 0.1))


def test_beta_normalisation_is_the_papers() -> None:
    values = torch.tensor([0.0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.float64)[:, None]
    groups = torch.arange(12) // 4
    p = torch.tensor([0.25, 0.75, 0.5], dtype=torch.float64)
    mean, variance = 0.5, float(p.var(correction=0))
    size = mean * (1 - mean) / variance - 1
    density = torch.distributions.Beta(1 + mean * size / 3, 1 + (1 - mean) * size / 3).log_prob(p).exp()
    torch.testing.assert_close(beta_density(p.repeat_interleave(4)[:, None], groups)[::4, 0], density)
    two = torch.distributions.Beta(1 + 0.5 * 3 / 3, 1 + 0.5 * 3 / 3)  # means 1/4 and 3/4: m 1/2, v 1/16, a + b = 3
    torch.testing.assert_close(beta_density(p[:2, None], torch.arange(2))[:, 0], two.log_prob(p[:2]).exp())
    found = Estimator(beta=True)(values, groups)[:, 0]
    own = p.repeat_interleave(4)
    torch.testing.assert_close(found, (values[:, 0] - own) / (density.repeat_interleave(4) + 1e-4))
    same = torch.tensor([0.0, 1, 0, 1], dtype=torch.float64)[:, None]  # nothing to fit: plain centring
    torch.testing.assert_close(Estimator(beta=True)(same, torch.arange(4) // 2)[:, 0], (same[:, 0] - 0.5) / 1.0001)


def test_the_risk_utility_has_the_gradient_of_the_mixed_value_at_risk() -> None:
    """Moving one score moves the mean of the lowest share, and of the middle one, by the utility's slope over N."""
    values = torch.rand(1000, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high, weight = 0.2, 0.8, 1.5
    found = risk_utility(values, low, high, weight)[:, 0]
    order = values[:, 0].argsort()
    slopes = found[order].diff() / values[order, 0].diff()
    assert torch.allclose(slopes[:190], torch.tensor(weight / low, dtype=torch.float64), rtol=1e-6)
    assert torch.allclose(slopes[210:790], torch.tensor(1 / (high - low), dtype=torch.float64), rtol=1e-6)
    assert not slopes[810:].any()
    assert Estimator(risk=(low, high, weight))(scores(), GROUPS)[20, 0] == 0  # not applicable stays so


def test_saturated_groups_are_banned() -> None:
    values = torch.tensor([0.95, 0.96, 0.97, 0.98, 0.1, 0.11, 0.12, 0.13, 0.8, 1, 1, 1], dtype=torch.float64)[:, None]
    found = Estimator(ban=(0.05, 0.9))(values, torch.arange(12) // 4)
    plain = group_advantages(values, torch.arange(12) // 4)
    assert not found[:4].any() and torch.equal(found[4:], plain[4:])  # alike but low, and high but wide, learn on
