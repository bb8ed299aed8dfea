"""Group-wise advantages against a loop, and their behaviour under missing rewards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffrl.advantages import group_advantages, weighted_sum
from diffrl.objectives.minibatches import optimiser_steps, sample_pairs


def scores_with_gaps() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(24, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 100.0, 0.01])
    groups = torch.arange(24) // 6
    scores[groups == 2, 1] = torch.nan  # reward 1 does not apply to prompt 2
    return scores, groups


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_against_a_loop(std: str) -> None:
    scores, groups = scores_with_gaps()
    ours = group_advantages(scores, groups, std).numpy()
    values = scores.numpy()
    for i in range(24):
        for k in range(3):
            if np.isnan(values[i, k]):
                assert ours[i, k] == 0.0
                continue
            group = values[groups.numpy() == int(groups[i]), k]
            everything = values[~np.isnan(values[:, k]), k]
            scale = {"group": group.std() + 1e-4, "batch": everything.std() + 1e-4, "none": 1.0}[std]
            assert ours[i, k] == pytest.approx((values[i, k] - group.mean()) / scale, rel=1e-9)


def test_any_constant_per_prompt_changes_nothing() -> None:
    scores, groups = scores_with_gaps()
    shifted = scores + groups[:, None] * 7.0
    assert torch.allclose(
        group_advantages(scores, groups, "none"), group_advantages(shifted, groups, "none"), atol=1e-12
    )


def test_float_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="integers"):
        group_advantages(torch.zeros(4, 1), torch.zeros(4))


def test_weighted_sum_leaves_out_what_does_not_apply() -> None:
    scores = torch.tensor([[1.0, 2.0], [1.0, torch.nan], [torch.nan, torch.nan]])
    total = weighted_sum(scores, torch.tensor([2.0, 10.0]))
    assert total[:2, 0].tolist() == [22.0, 2.0] and total[2, 0].isnan()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_optimiser_steps_do_not_depend_on_the_number_of_processes(world: int) -> None:
    total, batch = 96, 24
    whole = optimiser_steps(total, batch, 0, total, key=5)
    count = total // world
    for step in range(total // batch):
        parts = [optimiser_steps(total, batch, r * count, count, key=5)[step] + r * count for r in range(world)]
        assert torch.equal(torch.cat(parts), whole[step])
        assert {len(part) for part in parts} == {batch // world}  # no process waits for another
    assert torch.cat(whole).sort().values.equal(torch.arange(total))  # every image exactly once
    assert not torch.equal(whole[0], optimiser_steps(total, batch, 0, total, key=6)[0])


@pytest.mark.parametrize("world", [1, 2])
def test_whole_groups_stay_in_one_optimiser_step(world: int) -> None:
    total, batch, group = 96, 24, 6
    count = total // world
    for rank in range(world):
        for step in optimiser_steps(total, batch, rank * count, count, key=5, unit=group):
            ids = (step + rank * count) // group
            assert torch.unique(ids, return_counts=True)[1].tolist() == [group] * (batch // world // group)
    whole = optimiser_steps(total, batch, 0, total, key=5, unit=group)
    halves = [optimiser_steps(total, batch, r * 48, 48, key=5, unit=group) for r in range(2)]
    for step in range(total // batch):
        assert torch.equal(torch.cat([halves[0][step], halves[1][step] + 48]), whole[step])


def test_pairs_cover_every_row_once() -> None:
    pairs = sample_pairs(torch.tensor([4, 1]), 3)
    assert sorted(map(tuple, pairs.tolist())) == [(1, 0), (1, 1), (1, 2), (4, 0), (4, 1), (4, 2)]
    assert pairs[:2, 1].tolist() == [0, 0]  # members of a group share the timestep side by side


def test_the_sample_deviation_is_torch_std() -> None:
    """Also where a reward does not apply to some; a group of one and a group that agrees have no signal."""
    scores = torch.tensor(
        [[0.3, 1.0], [0.9, torch.nan], [0.5, 0.2], [0.1, torch.nan], [0.7, 0.1], [0.7, 0.1], [0.4, 0.3]]
    )
    groups = torch.tensor([0, 0, 0, 1, 2, 2, 3])
    found = group_advantages(scores.double(), groups, "sample")
    own, two = scores[:3, 0].double(), scores[[0, 2], 1].double()
    torch.testing.assert_close(found[:3, 0], (own - own.mean()) / (own.std() + 1e-8))
    torch.testing.assert_close(found[[0, 2], 1], (two - two.mean()) / (two.std() + 1e-8))
    assert not found[1, 1] and not found[3:].any()
