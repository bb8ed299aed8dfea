"""SRUM's regional scores: losses with an advantage for each latent cell, in float64, their limits, and whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import train_on_two
from torch import Tensor

from diffrl.advantages import group_advantages
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.forward import FlowMatching, Prediction
from diffrl.methods.marble.bank import columns_of, loss_slopes
from diffrl.methods.nft.objective import NFT
from diffrl.methods.rwr.objective import Regression
from diffrl.methods.shared.regions import Regions, centred_cells
from diffrl.methods.shared.spatial import SpatialRows
from diffrl.objectives.advantages import AdvantageRule, ScoredBatch
from diffrl.objectives.rows import Rows
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.rewards.protocol import RewardError
from diffrl.run.train import train

DATA = Path(__file__).parents[1] / "data"
B, C, H, W, K = 3, 2, 4, 4, 2


def fixed(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(cells: Tensor | None, advantages: Tensor) -> tuple[Any, Rows, Tensor]:
    """A policy whose velocity is a tensor with a gradient; off policy, so that old is another one."""
    x0, eps, v, v_old = fixed(0, B, C, H, W), fixed(1, B, C, H, W), fixed(2, B, C, H, W), fixed(3, B, C, H, W)
    v.requires_grad_()
    t = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    process = FlowMatching()
    x_t = process.add_noise(x0, eps, t)

    def predict(*_: Any) -> Prediction:
        velocity = v if policy.name is None else v_old
        return Prediction(x0=x_t - t[:, None, None, None] * velocity, eps=eps, v=velocity)

    def adapter(name: str) -> Any:
        policy.name = name
        return _Leaving(policy)

    policy: Any = SimpleNamespace(process=process, predict=predict, adapter=adapter, name=None)
    rows = SpatialRows(
        x0=x0,
        x_t=x_t,
        t=t,
        cond=None,
        advantages=advantages,
        groups=torch.zeros(B, dtype=torch.long),
        on_policy=False,
        pairs=torch.zeros(B, 2, dtype=torch.long),
    )  # type: ignore[arg-type]
    rows.eps, rows.cells = eps, cells
    return policy, rows, v


class _Leaving:
    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.policy.name = None


def trained(objective: Any, cells: Tensor | None, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (K,) and the gradient of their sum at the velocity."""
    objective.on_policy = False
    policy, rows, v = rows_of(cells, advantages)
    losses = objective.loss(objective.scalars(policy, rows), rows)
    return losses.detach(), torch.autograd.grad(losses.sum(), v)[0]


def nft_by_cells(advantages: Tensor, cells: Tensor, b: float, most: float) -> Tensor:
    """The paper's loss with r for each cell in the place of r for each image, by loops."""
    _, rows, v = rows_of(None, advantages)
    total = torch.zeros(K, dtype=torch.float64)
    v_old = fixed(3, B, C, H, W)
    for i in range(B):
        sides = [(1 - b) * v_old[i] + b * v[i].detach(), (1 + b) * v_old[i] - b * v[i].detach()]
        errors = [rows.x_t[i] - rows.t[i] * side - rows.x0[i] for side in sides]
        sizes = [float(error.abs().mean()) for error in errors]
        for k in range(K):
            for y in range(H):
                for x in range(W):
                    a = min(max(float(advantages[i, k] + cells[i, k, y, x]), -most), most)
                    r = a / (2 * most) + 0.5
                    plus, minus = (float((e[:, y, x] ** 2).mean()) / s for e, s in zip(errors, sizes, strict=True))
                    total[k] += most / b * (r * plus + (1 - r) * minus) / (H * W)
    return total


def test_nft_has_an_advantage_for_each_cell() -> None:
    advantages, cells = 2 * fixed(4, B, K), 3 * fixed(5, B, K, H, W)
    objective = NFT(b=0.7)
    objective.adv_clip = 2.0
    losses, _ = trained(objective, cells, advantages)
    torch.testing.assert_close(losses, nft_by_cells(advantages, cells, 0.7, 2.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", [NFT(b=0.7), Regression(weights="linear")])
def test_a_map_that_is_constant_is_the_scalar_advantage(objective: Any) -> None:
    advantages = fixed(4, B, K)
    maps = fixed(6, B, 1, 1).expand(-1, 6, 5)
    cells = centred_cells(maps, (H, W))[:, None].expand(-1, K, -1, -1)
    for ours, plain in zip(trained(objective, cells, advantages), trained(objective, None, advantages), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    # and an advantage of the cell that is the image's shifted is the shifted image's
    if isinstance(objective, Regression):
        shifted = trained(objective, torch.full((B, K, H, W), 0.25, dtype=torch.float64), advantages)
        for ours, plain in zip(shifted, trained(objective, None, advantages + 0.25), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_regression_is_srums_loss_with_a_gradient_only_where_the_map_says() -> None:
    """L = mean((a R(cell) + l) (v_theta - v)^2); with l = 0 and R = 0 somewhere, nothing is learned there."""
    maps = fixed(7, B, H, W)
    maps[:, :, :2] = 0.0
    for constraint in (0.0, 0.5):
        weights = maps.mean((1, 2))[:, None] + constraint
        cells = centred_cells(maps, (H, W))[:, None]
        losses, gradient = trained(Regression(weights="linear"), cells, weights)
        _, rows, v = rows_of(None, weights)
        errors = (v.detach() - (rows.eps - rows.x0)).square().mean(1)  # type: ignore[operator]
        wanted = ((maps + constraint) * errors).mean((1, 2)).sum()
        torch.testing.assert_close(losses[0], wanted, rtol=1e-12, atol=1e-12)
        by_hand = 2 * (maps + constraint)[:, None] * (v.detach() - (rows.eps - rows.x0)) / (C * H * W)  # type: ignore[operator]
        torch.testing.assert_close(gradient, by_hand, rtol=1e-12, atol=1e-12)
        assert bool(gradient[..., 2:].all()) and bool(gradient[..., :2].any()) == (constraint > 0)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("mode", [None, "fresh", "sum", "advantages"])
def test_a_cells_advantage_is_that_of_its_score_at_the_groups_statistics(std: Any, mode: Any) -> None:
    """In every column in which the reward is: A(c) = (R(c) - mean) / std, and their mean over the cells is A."""
    scores, weights = fixed(8, 8, 2), torch.tensor([0.5, 3.0], dtype=torch.float64)
    maps = fixed(9, 8, 4, 4)
    scores[:, 1] = maps.mean((1, 2))
    groups = torch.arange(8) // 4
    rule = AdvantageRule(std)
    if mode is not None:
        rule = replace(rule, columns=columns_of(mode, True))
    scored = ScoredBatch(scores, weights, groups, torch.zeros(8, 1), torch.zeros(8, 0))
    regions = Regions([1], ["mapped"])
    regions.see(rule, scored)
    rollout: Any = SimpleNamespace(latents=torch.zeros(8, 1, 4, 4), maps={"mapped": maps}, first=0)
    pairs = torch.stack([torch.arange(8), torch.zeros(8, dtype=torch.long)], 1)
    cells, advantages = regions.of(rollout, pairs).double(), rule(scored)
    assert cells.shape == (8, advantages.shape[1], 4, 4)
    assert float(cells.mean((2, 3)).abs().max()) < 1e-6
    # one image's score becomes that of one of its cells, while mean and std of the group stay: by a linear map
    moved = advantages[:, -1, None, None] + cells[:, -1]
    if std == "none":
        for y, x in ((0, 0), (3, 2)):
            other = scores.clone()
            other[2, 1] = maps[2, y, x]
            step = (other[2, 1] - scores[2, 1]) * weights[1]
            torch.testing.assert_close(moved[2, y, x] - advantages[2, -1], step, rtol=1e-5, atol=1e-6)
    if mode == "fresh":
        assert not cells[:, 0].any()  # the other reward has no map
        column = maps * weights[1]
        own = scores[:, 1:] * weights[1]
        a, b = group_advantages(own, groups, std)[:, 0], own[:, 0]
        i, j = 0, 1
        unit = (a[i] - a[j]) / (b[i] - b[j])  # of the group's statistics
        torch.testing.assert_close(moved[0], a[0] + (column[0] - b[0]) * unit, rtol=1e-5, atol=1e-5)


def test_places_without_a_word_and_other_sizes() -> None:
    maps = torch.tensor([[[1.0, float("nan")], [3.0, float("nan")]]])
    cells = centred_cells(maps, (4, 4))
    assert cells[0, :, 0].tolist() == [-1, -1, 1, 1] and not cells[0, :, 2:].any()
    assert centred_cells(torch.arange(64.0).view(1, 8, 8), (2, 2)).sum().abs() < 1e-12


def test_the_cells_of_weights_are_not_divided() -> None:
    """Regression's weights are scores and a constant: a cell's weight is its own score, whatever the group's std."""
    objective, scores = Regression(weights="linear"), fixed(3, 6, 1)
    objective.see_regions([0], ["mapped"])
    assert objective.regions is not None
    assert (objective.regions.scale(scores, torch.arange(6) // 3, "group") == torch.ones(6, 1)).all()


def test_each_rewards_own_scalar_serves_marble() -> None:
    objective = NFT()
    objective.see_regions([1], ["mapped"])
    assert objective.basis is None
    objective.on_policy = False
    policy, rows, _ = rows_of(fixed(5, B, K, H, W), fixed(4, B, K))
    phi = objective.scalars(policy, rows)
    _, slopes = loss_slopes(objective, phi, rows)
    assert phi.shape == (B, 2 + K) and not slopes[0, :, 3].any() and not slopes[1, :, 2].any()


# ---- whole runs

MAPPED = {"redness": {"plugin": f"{DATA}/mapped.py:Mapped", "spatial": True}}


def lora_of(run_dir: str | Path) -> dict[str, Tensor]:
    path = checkpoint.latest(Path(run_dir))
    assert path is not None
    return checkpoint.load(path)[0]["lora"]


def trained_run(config_file: Any, name: str, **sections: Any) -> dict[str, Tensor]:
    config = load_config(
        config_file(name, **{"epochs": 1, "rollout": {"groups": 2}, "evaluate": {"every": 9}, **sections})
    )
    train(config)
    return lora_of(config.run_dir)


def test_a_run_on_a_constant_map_is_one_on_its_score_and_another_map_is_not(config_file: Any) -> None:
    runs = []
    for kind, spatial in (("Constant", True), ("Constant", False), ("Mapped", True)):
        rewards = {"redness": {"plugin": f"{DATA}/mapped.py:{kind}", "spatial": spatial}}
        runs.append(trained_run(config_file, f"{kind}{spatial}", rewards=rewards))
    one, other, third = (torch.cat([t.flatten() for t in lora.values()]) for lora in runs)
    assert float((one - third).norm()) > 100 * float((one - other).norm())  # which is the rounding of two means


@pytest.mark.long
@pytest.mark.parametrize(
    "around",
    [
        {"objective": "rwr", "rwr": {"weights": "linear"}},
        {"gardo": {"auxiliary": ["gold"]}, "watch": {"gold": {"plugin": f"{DATA}/redness.py:Redness", "power": 2.0}}},
        {"marble": {"mode": "fresh"}},
        {"marble": {"mode": "advantages", "measure": False}},
    ],
)  # fmt: skip
def test_it_trains_in_each_company(config_file: Any, around: dict[str, Any]) -> None:
    rewards = {**MAPPED, "plain": {"plugin": f"{DATA}/redness.py:Redness"}}
    without = {**rewards, "redness": {**MAPPED["redness"], "spatial": False}}
    before = trained_run(config_file, "plainly", **{**around, "rewards": without})
    after = trained_run(config_file, "mapped", **{**around, "rewards": rewards})
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())


@pytest.mark.long
def test_resume_is_exact(config_file: Any) -> None:
    whole = load_config(config_file("whole", rewards=MAPPED))
    train(whole)
    part = load_config(config_file("part", rewards=MAPPED, epochs=2))
    train(part)
    train(load_config(config_file("part", rewards=MAPPED, epochs=3)), resume=Path(part.run_dir))
    ours, expected = lora_of(part.run_dir), lora_of(whole.run_dir)
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
def test_one_process_equals_two(config_file: Any) -> None:
    alone, shared = (config_file(name, rewards=MAPPED) for name in ("alone", "shared"))
    train(load_config(alone))
    train_on_two(shared)
    one, two = (lora_of(load_config(path).run_dir) for path in (alone, shared))
    difference = sum(float((one[k] - two[k]).double().square().sum()) for k in one)
    assert (difference / sum(float(v.double().square().sum()) for v in one.values())) ** 0.5 < 1e-5
    for a, b in zip(*(read_metrics(load_config(path).run_dir) for path in (alone, shared)), strict=True):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-7)


SPATIAL = r"rewards\.redness\.spatial"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"objective": "grpo", "rollout": {"sampler": "flow_sde"}}, SPATIAL + r': objective "grpo" does not .* nft'),
        ({"objective": "rwr"}, SPATIAL + r": .* rwr\.weights: linear"),
        ({"rewards": {"redness": {"plugin": f"{DATA}/redness.py:Redness", "spatial": True}}}, SPATIAL + ": .* no map"),
        ({"rewards": {"redness": {**MAPPED["redness"], "cache": "scores"}}}, r"rewards\.redness\.cache: is of scores"),
        ({"rewards": {"redness": {**MAPPED["redness"], "shape": {"clip": [None, 1]}}}}, r"\.shape: is of scores"),
        ({"advantages": {"agree": "leave_out"}}, r"advantages: does not go with rewards\.redness\.spatial"),
        ({"rollout": {"scout": {}}}, r"rollout\.scout: does not go with rewards\.redness\.spatial"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_its_key(config_file: Any, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load_config(config_file("mistake", **{"rewards": MAPPED, **sections}))
    assert "\n" not in str(caught.value)


def test_a_map_of_another_shape_ends_the_run_in_a_line(config_file: Any) -> None:
    rewards = {"redness": {"plugin": f"{DATA}/mapped.py:Broken", "spatial": True}}
    with pytest.raises((UserError, RewardError), match=r"shape \(\d+,\) instead of \(\d+, 9\)"):
        train(load_config(config_file("run", rewards=rewards)))
