"""MARBLE's config, its advantages, and what it logs and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffrl.advantages import decoupled_advantages, group_advantages
from diffrl.config import Config, load_config
from diffrl.config.schema import config_class
from diffrl.errors import UserError
from diffrl.methods.marble.bank import PerRewardGradients, columns_of
from diffrl.methods.marble.combiner import Marble
from diffrl.objectives.advantages import AdvantageRule, ScoredBatch
from diffrl.objectives.gradients import SumOfLosses
from diffrl.policy.lora import Adapters, LoraSpec
from diffrl.records.tracking import Tracker
from diffrl.report import write_report
from diffrl.run.build import build_gradients, build_objective

SCORES = torch.tensor([[1.0, 10.0], [2.0, 30.0], [3.0, 20.0], [5.0, torch.nan], [7.0, torch.nan], [9.0, torch.nan]])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
TWO = {"rewards": {"one": {"plugin": "x.py:X"}, "two": {"plugin": "y.py:Y"}}}


def scored(weights: tuple[float, float] = (1.0, -2.0)) -> ScoredBatch:
    return ScoredBatch(SCORES, torch.tensor(weights), GROUPS, torch.zeros(6, 0), torch.zeros(6, 0))


def config(**marble: Any) -> Config:
    values = {**TWO, "marble": marble}
    return config_class(values).model_validate(values)


def test_each_reward_has_a_column_with_its_weights_sign_and_nan_is_no_signal() -> None:
    rule = AdvantageRule("group", columns_of("fresh", True))
    columns = rule(scored())
    assert torch.allclose(columns[:, :1], group_advantages(SCORES[:, :1], GROUPS))
    assert torch.allclose(columns[:, 1:], -group_advantages(SCORES[:, 1:], GROUPS), atol=1e-5)
    assert columns[3:, 1].tolist() == [0, 0, 0]
    assert rule.known(scored()).tolist() == [[True, True]] * 3 + [[True, False]] * 3


def test_a_total_stands_last_and_alone_where_nothing_is_measured() -> None:
    plain = AdvantageRule("group")
    total = plain(scored())
    assert total.shape == (6, 1) and plain.known(scored()).shape == (6, 1)
    rule = AdvantageRule("group", columns_of("sum", True))
    assert torch.equal(rule(scored())[:, 2:], total) and rule.known(scored()).shape == (6, 3)
    alone = AdvantageRule("group", columns_of("advantages", False))(scored())
    assert torch.equal(alone, decoupled_advantages(SCORES, torch.tensor([1.0, -2.0]), GROUPS))


def test_decoupled_advantages_are_normalised_before_and_after_the_sum() -> None:
    weights = torch.tensor([1.0, -2.0])
    each = group_advantages(SCORES, GROUPS).double()
    total = each @ weights.double()
    expected = total / (total.std(correction=0) + 1e-4)
    assert torch.allclose(decoupled_advantages(SCORES, weights, GROUPS)[:, 0].double(), expected, atol=1e-6)
    scaled = SCORES * torch.tensor([1000.0, 1.0])
    assert torch.allclose(decoupled_advantages(scaled, weights, GROUPS).double()[:, 0], expected, atol=1e-3)
    raw = decoupled_advantages(SCORES, weights, GROUPS, "none")
    assert torch.allclose(raw, group_advantages(SCORES, GROUPS, "none") @ weights[:, None])


def test_the_config_builds_what_it_says() -> None:
    assert isinstance(build_gradients(config_class(TWO).model_validate(TWO)), SumOfLosses)
    for mode, measure, plain in (("sum", False, True), ("advantages", False, True), ("sum", True, False)):
        chosen = config(mode=mode, measure=measure)
        assert isinstance(build_gradients(chosen), SumOfLosses) == plain
    chosen = config(mode="amortised", every=4, smoothing=0.5)
    marble = build_gradients(chosen)
    assert isinstance(marble, Marble) and marble.names == ["one", "two"]
    assert (marble.mode, marble.every, marble.smoothing) == ("amortised", 4, 0.5)
    assert build_objective(chosen, chosen.rollout).rule.each
    assert not build_objective(config_class(TWO).model_validate(TWO), chosen.rollout).rule.each


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["marble.mode=frsh"], 'marble.mode: expected one of fresh, full, amortised, .* \\(nearest: "fresh"\\)'),
        (["rewards.two=null"], r"marble: there is one reward \(redness\), so nothing to balance"),
        (["marble.smoothing=1"], "marble.smoothing: expected less than 1"),
    ],
)
def test_bad_configs_are_named(config_file, overrides: list[str], message: str) -> None:
    reward = str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"
    path = config_file(marble={}, rewards={"two": {"plugin": reward, "power": 2.0}})
    assert load_config(path).marble is not None
    with pytest.raises(UserError, match=message):
        load_config(path, overrides)


def finished(marble: Marble, gradients: torch.Tensor, signal: list[float] | None = None) -> torch.Tensor:
    """d for made-up gradients (K, size) of the step's rewards."""
    marble._bank = PerRewardGradients(gradients.clone(), torch.tensor(signal or [1.0] * len(gradients)))
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1]))
    marble.finish([parameter], None)
    assert parameter.grad is not None
    return parameter.grad


def test_coefficients_are_smoothed_and_stay_on_the_simplex() -> None:
    marble = Marble(["a", "b"], mode="fresh", smoothing=0.7)
    finished(marble, torch.tensor([[4.0, 0.0], [0.0, 1.0]]))
    assert marble.ema == pytest.approx([0.5, 0.5])  # of unit vectors
    step = finished(marble, torch.tensor([[1.0, 0.0], [0.6, 0.8]]))
    assert marble.ema == pytest.approx([0.5, 0.5])
    assert torch.allclose(step, torch.tensor([0.8, 0.4]))
    side = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])  # a lies between b and c
    three = Marble(["a", "b", "c"], mode="fresh", smoothing=0.7)
    finished(three, side)
    assert three.ema == pytest.approx([0.0, 0.5, 0.5]), "the first optimum is where smoothing begins"
    step = finished(three, side.roll(1, 0))  # now b lies between, at the optimum [0.5, 0, 0.5]
    assert three.ema == pytest.approx([0.15, 0.35, 0.5])
    assert torch.allclose(step, torch.tensor([0.6, 0.0]), atol=1e-6), "the solving step takes the optimum itself"


def test_opposed_rewards_stop_each_other_and_say_so() -> None:
    marble = Marble(["a", "b"], mode="fresh")
    assert finished(marble, torch.tensor([[1.0, 2.0], [-2.0, -4.0]])).abs().max() < 1e-6
    assert marble.metrics()["marble/cos_min"] == pytest.approx(0.0, abs=1e-6)


def test_a_gradient_that_is_not_finite_reaches_the_loop_and_changes_no_coefficient() -> None:
    marble = Marble(["a", "b"], mode="fresh")
    finished(marble, torch.tensor([[1.0, 0.0], [1.0, 0.1]]))
    before = marble.ema.copy()
    step = finished(marble, torch.tensor([[1.0, float("inf")], [1.0, 0.1]]))
    assert not torch.isfinite(step).all() and np.array_equal(marble.ema, before)
    assert len(json.loads(marble.metrics()["marble/steps"])) == 1
    finished(marble, torch.full((2, 2), float("nan")))
    assert marble.metrics() == {}


def test_norms_are_logged_without_the_scale_of_fp16() -> None:
    marble = Marble(["a", "b"], mode="fresh")
    marble._scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    marble._scaler.scale(torch.ones(()))
    finished(marble, 8 * torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    metrics = marble.metrics()
    assert (metrics["marble/norm/a"], metrics["marble/norm/b"]) == (pytest.approx(5), pytest.approx(1))


def test_metrics_are_means_of_the_epochs_steps_and_start_anew() -> None:
    marble = Marble(["a", "b"], mode="fresh", smoothing=0.9)
    finished(marble, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    finished(marble, torch.tensor([[3.0, 0.0], [3.0, 0.3]]), [1.0, 0.0])
    metrics = marble.metrics()
    assert metrics["marble/norm/a"] == pytest.approx(2.0) and metrics["marble/norm/b"] == pytest.approx(1.0)
    assert metrics["marble/alpha/a"] == pytest.approx(0.5)
    assert metrics["marble/cos_min"] == pytest.approx(0.5**0.5)
    steps = json.loads(metrics["marble/steps"])
    assert [step["norm"] for step in steps] == [[1.0, 1.0], [3.0, None]]
    assert marble.metrics() == {}


def test_the_state_is_the_smoothed_coefficients_and_the_step() -> None:
    marble = Marble(["a", "b", "c"], mode="amortised", every=2)
    gradients = torch.tensor([[1.0, 0.0, 0.1], [0.9, 0.5, 0.0], [0.0, 0.3, 1.0]])
    finished(marble, gradients)
    other = Marble(["a", "b", "c"], mode="amortised", every=2)
    other.load_state_dict(json.loads(json.dumps(marble.state_dict())))
    assert other.steps == 1 and np.array_equal(other.ema, marble.ema) and other._one_pass()
    assert torch.equal(finished(other, gradients), finished(marble, gradients))
    assert np.array_equal(other.ema, marble.ema)


def test_the_trained_lora_alone_is_taken_over() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 3))
    adapters = Adapters(network, LoraSpec(2, 2), ["0"])
    from diffrl.methods.marble.gradients import LoraGradients

    assert LoraGradients(adapters).size == 2 * 3 + 3 * 2


def test_the_report_draws_coefficients_norms_and_cosines(tmp_path) -> None:
    marble = Marble(["ocr", "clip"], mode="fresh")
    (tmp_path / "config.yaml").write_text("rewards: {ocr: {}, clip: {}}\nmarble: {mode: fresh}\n")
    with Tracker(tmp_path) as tracker:
        for epoch in range(1, 4):
            finished(marble, torch.tensor([[1.0, 0.1 * epoch], [0.5, 1.0]]))
            tracker.log({"epoch": epoch, "step": epoch, "samples": 10 * epoch, "loss": 0.1} | marble.metrics())
    text = write_report(tmp_path).read_text()
    assert "Balance of the rewards" in text
    for title in ("coefficients", "gradient norms", "cosines"):
        assert title in text
    assert "no step went against any reward" in text
    assert "marble/" not in text  # nothing is left for the section of other metrics


def test_runs_without_marble_have_no_such_section(tmp_path) -> None:
    with Tracker(tmp_path) as tracker:
        for epoch in (1, 2):
            tracker.log({"epoch": epoch, "step": epoch, "samples": epoch, "loss": 0.1})
    assert "Balance of the rewards" not in write_report(tmp_path).read_text()
