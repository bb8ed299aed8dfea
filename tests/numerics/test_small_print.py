"""Lines that a fresh sample of mutations changed without a test of these folders failing (tests/stress/mutations.py).

Each test says the right value by hand: floors, what methods cost, what they log, what they warn of.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffrl.advantages import group_scale
from diffrl.methods.branches import BranchesSection
from diffrl.methods.branches.credit import Branching
from diffrl.methods.d2align.direction import learn
from diffrl.methods.dense import DenseSection
from diffrl.methods.dense.credit import Dense
from diffrl.methods.dgpo.objective import DGPO
from diffrl.methods.dpo.objective import DPO
from diffrl.methods.fdfo.objective import FDFO
from diffrl.methods.marble import MarbleSection
from diffrl.methods.marble.combiner import build_combiner
from diffrl.methods.prdp.objective import PRDP
from diffrl.methods.rwr.objective import Regression
from diffrl.objectives import rows
from diffrl.objectives.running_stats import summaries
from diffrl.samplers import SamplerSpec


def test_the_floor_of_a_samples_deviation_is_added_to_it() -> None:
    scores = torch.tensor([[0.0], [2e-9]], dtype=torch.float64)
    scale = group_scale(scores, torch.zeros(2, dtype=torch.long), "sample")
    assert scale.flatten().tolist() == pytest.approx([2e-9 / 2**0.5 + 1e-8] * 2, rel=1e-6)


def test_a_level_drawn_evenly_is_never_below_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "noise", lambda shape, names: torch.tensor([-9.0, 0.0, 9.0]))
    rollout: Any = SimpleNamespace(schedule=torch.linspace(1, 0, 4))
    sigmas = rows.row_sigmas(rollout, [("a",)] * 3, torch.arange(3), 3, "uniform")
    assert sigmas.tolist() == pytest.approx([1e-4, 0.5, 1.0])


def test_what_methods_cost_beside_the_trained_forward() -> None:
    rollout: Any = SimpleNamespace(group_size=8)
    assert FDFO(SamplerSpec("euler", 4)).cost(rollout, False, 4).forwards == 0.75  # old: in three steps of four
    assert Regression(weights="best").cost(rollout, False, 4).share == 1 / 8
    assert Regression().cost(rollout, False, 4).share == 1.0


def test_a_group_has_its_mean_by_its_place_on_its_process() -> None:
    """Groups 2 and 3 on a process whose first is 2, with means 0 and 10: x0 is 1 and 3 away from them."""
    objective = FDFO(SamplerSpec("euler", 4))
    means = torch.tensor([[[[0.0]]], [[[10.0]]]])
    objective._means = (None, 2, means)  # type: ignore[assignment]
    v = torch.zeros(2, 1, 1, 1, requires_grad=True)
    policy: Any = SimpleNamespace(predict=lambda *_: SimpleNamespace(v=v))
    batch: Any = SimpleNamespace(
        x0=torch.tensor([1.0, 13.0]).view(2, 1, 1, 1), groups=torch.tensor([2, 3]), on_policy=True,
        x_t=None, t=None, cond=None, guidance=1.0,
    )  # fmt: skip
    objective.scalars(policy, batch)
    assert summaries(objective.means.take())["fdfo/difference"] == pytest.approx(2.0)


def test_what_groups_log_of_their_gates_and_clips() -> None:
    """One group of two images with one timestep, a = +-1, d = +-d: S = b d; the gate is sigma(S)."""
    dgpo, a = DGPO(b=2.0, clip=None), torch.tensor([[[1.0], [-1.0]]])
    d = torch.tensor([[[-1.5], [1.5]]])
    dgpo._slopes(torch.stack([d, torch.zeros_like(d)]), a, torch.tensor([True]))
    gate = torch.tensor(-3.0).sigmoid()
    logged = summaries(dgpo.means.take())
    assert logged["dgpo/gate"] == pytest.approx(float(gate))
    assert logged["dgpo/gate_spread"] == pytest.approx(0.5 - float(gate))
    prdp = PRDP(SamplerSpec("flow_sde", 3))
    old = torch.tensor([[[0.5], [2.0]]])
    ratio = old + prdp.clip * torch.tensor([[[0.5], [2.0]]])  # one within the clip, one outside
    prdp._slopes(torch.stack([ratio, old]), a, torch.tensor([True]))
    logged = summaries(prdp.means.take())
    # (mean log-ratios' difference - that of r / b)^2 for the one pair: plain 1.5 + 1.5 clip, held 1.5 + 0.5 clip
    assert logged["prdp/clip_fraction"] == 0.5
    assert logged["prdp/loss"] == pytest.approx((2 + 1.5 + 1.5 * prdp.clip) ** 2, rel=1e-6)


def test_a_loser_that_is_turned_is_counted_once_for_each_pair_and_level() -> None:
    """Two groups of a winner and a loser, two levels: the reference fits the winner better (d > 0) at one of four."""
    dpo, a = DPO(flip=True, follow=1, b=2.0), torch.tensor([[1.0], [-1.0]]).expand(2, 2, 1)
    d = torch.tensor([[[-1.0, 1.0], [0.5, 0.5]], [[-1.0, -1.0], [0.5, 0.5]]])
    dpo._slopes(d[None], a, torch.tensor([True, True]))
    assert summaries(dpo.means.take())["dpo/flipped"] == 0.25


def test_prdp_has_slopes_for_each_column_of_advantages() -> None:
    """Under MARBLE, which asks for each reward's own gradient: a column's are those that it has alone."""
    prdp, source = PRDP(SamplerSpec("flow_sde", 3)), torch.Generator().manual_seed(0)
    measured, a = torch.randn(2, 2, 4, 3, generator=source), torch.randn(2, 4, 2, generator=source)
    mine = torch.tensor([True, True])
    both = prdp._slopes(measured, a, mine)
    alone = [prdp._slopes(measured, a[..., k : k + 1], mine) for k in range(2)]
    torch.testing.assert_close(both, torch.cat(alone, dim=-1))
    assert not torch.allclose(*alone)


@pytest.mark.parametrize(
    ("mode", "std", "warned"), [("amortised", "none", True), ("amortised", "group", False), ("full", "none", False)]
)
def test_marble_warns_of_scales_only_where_they_decide(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: Any, std: str, warned: bool
) -> None:
    monkeypatch.setattr("diffrl.methods.marble.combiner.advantage_std", lambda config: (std, "nft.advantage_std"))
    with caplog.at_level(logging.WARNING, "diffrl"):
        assert build_combiner(MarbleSection(mode=mode), SimpleNamespace(rewards={"a": 1, "b": 2})) is not None  # type: ignore[arg-type]
    assert ("rewards of the largest scale decide" in caplog.text) == warned


def test_a_method_s_credit_is_made_of_its_section() -> None:
    config: Any = SimpleNamespace(rollout=SimpleNamespace(same_noise=True, group_size=4, steps=6, stochastic_steps=6))
    assert Dense.of(DenseSection(), config).common is True
    credit = Branching.of(BranchesSection(), config)
    assert (credit.group, credit.steps) == (4, (0, 1, 2, 3, 4))


def test_the_course_of_a_direction_ends_with_its_last_step() -> None:
    """121 steps are told every second one, and the last one, which is odd."""
    generator = torch.Generator().manual_seed(0)
    e_img, e_text = (torch.nn.functional.normalize(torch.randn(4, 3, generator=generator), dim=1) for _ in range(2))
    reward: Any = SimpleNamespace(score=lambda images, texts: (images * texts).sum(1))
    _, course = learn(reward, e_img, e_text, torch.arange(4), omega=0.5, steps=121, learning_rate=1e-3, seed=0)
    assert [course[-2][0], course[-1][0]] == [120, 121]
