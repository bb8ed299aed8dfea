"""What groups that agree give: each estimate against its formula in float64, and where it is the plain one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffrl.advantages import group_advantages
from diffrl.objectives.estimates import Estimator

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


def test_only_leaving_out_makes_up_for_what_is_silent() -> None:
    values = torch.tensor([1.0, 1, 0.9, 1, 0, 0, 0, 1], dtype=torch.float64)[:, None]
    groups, plain = torch.arange(8) // 4, Estimator("floor")
    banned = Estimator("floor", ban=(0.1, 0.9))(values, groups)
    assert not banned[:4].any()  # saturated: hardly a spread, and a high mean
    assert torch.equal(banned[4:], plain(values, groups)[4:])


def test_saturated_groups_are_banned() -> None:
    values = torch.tensor([0.95, 0.96, 0.97, 0.98, 0.1, 0.11, 0.12, 0.13, 0.8, 1, 1, 1], dtype=torch.float64)[:, None]
    found = Estimator(ban=(0.05, 0.9))(values, torch.arange(12) // 4)
    plain = group_advantages(values, torch.arange(12) // 4)
    assert not found[:4].any() and torch.equal(found[4:], plain[4:])  # alike but low, and high but wide, learn on
