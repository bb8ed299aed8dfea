"""What becomes of scores before they are optimised: each step, their order, and what a config may say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from diffrl.config import dump, help_config, load_config
from diffrl.errors import UserError
from diffrl.rewards.compose import (
    Composition,
    bound,
    clip,
    ensemble,
    gate,
    log,
    modulate,
    spread,
    standardise,
    threshold,
    win_rate,
)
from diffrl.rewards.order import STEPS, in_order

NAN = math.nan
SCORES = torch.tensor([-2.0, 0.0, NAN, 1.0, 5.0, NAN])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def same(result: Tensor, *expected: float) -> None:
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32), equal_nan=True)


def test_clip_holds_scores_within_bounds() -> None:
    same(clip(SCORES, -1, 3), -1, 0, NAN, 1, 3, NAN)
    same(clip(SCORES, low=0), 0, 0, NAN, 1, 5, NAN)


def test_log_is_odd_straight_near_zero_and_tame_far_out() -> None:
    same(log(SCORES), -math.log(3), 0, NAN, math.log(2), math.log(6), NAN)
    torch.testing.assert_close(
        log(torch.tensor([1e-4, 1e4]), scale=2), torch.tensor([5e-5, 8.51739]), rtol=1e-4, atol=0
    )


def test_threshold_counts_from_its_value_on() -> None:
    same(threshold(SCORES, at=1.0), 0, 0, NAN, 1, 1, NAN)


def test_standardise_is_over_all_known_scores() -> None:
    known = torch.tensor([-2.0, 0.0, 1.0, 5.0]).double()
    z = ((known - known.mean()) / known.std(correction=0)).tolist()
    same(standardise(SCORES), z[0], z[1], NAN, z[2], z[3], NAN)
    same(standardise(SCORES, limit=1.0), -1, z[1], NAN, z[2], 1, NAN)
    same(standardise(torch.tensor([0.1, 0.1, NAN])), 0, 0, NAN)
    assert standardise(torch.tensor([NAN, NAN])).isnan().all()


def test_win_rate_compares_inside_a_group() -> None:
    scores = torch.tensor([3.0, 1.0, 1.0, NAN, 9.0, NAN])
    same(win_rate(scores, torch.tensor([7, 7, 7, 7, 2**40, 2**40])), 1.0, 0.25, 0.25, NAN, 0.5, NAN)


def test_ensembles_judge_by_mean_worst_and_bound() -> None:
    columns = torch.tensor([[1.0, 3.0], [2.0, NAN], [NAN, 4.0], [0.0, -4.0]])
    same(ensemble(columns), 2, 2, NAN, -2)
    same(ensemble(columns, "min"), 1, 2, NAN, -4)
    same(ensemble(columns, "lower", 0.5), 1.5, 2, NAN, -3)
    same(ensemble(columns, "lower", -1.0), 3, 2, NAN, 0)


def test_a_gate_lets_quality_count_only_where_the_content_is_right() -> None:
    by = torch.tensor([0.9, 0.5, 0.0, 0.4, NAN, 0.0])
    same(gate(SCORES, by, least=0.5, otherwise=-7), -2, 0, NAN, -7, 5, NAN)


def test_base_and_bonus_are_multiplied() -> None:
    base, bonus = torch.tensor([0.0, 1.0, 0.5, 0.5, NAN, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.5, 0.3, NAN])
    same(modulate(base, bonus, base=0.4), 0, 0.4, 0.5, 0.35, NAN, 1)
    same(modulate(base, bonus, base=1.0), 0, 1, 0.5, 0.5, NAN, 1)
    grid = torch.linspace(0, 1, 11)
    table = modulate(grid[:, None].expand(11, 11), grid.expand(11, 11))
    assert (table.diff(dim=0) >= 0).all() and (table.diff(dim=1) >= 0).all() and (table[0] == 0).all()


def test_a_bounded_reward_is_one_half_at_its_reference() -> None:
    same(bound(torch.tensor([2.0, 4.0, NAN]), at=2.0, scale=2.0), 0.5, 1 / (1 + math.exp(-1)), NAN)
    composition = Composition(["a"], {"a": {"bound": {}}})
    groups = torch.zeros(2, dtype=torch.int64)
    first = composition(torch.tensor([[1.0], [3.0]]), groups)
    same(first[:, 0], 1 / (1 + math.e), math.e / (1 + math.e))
    same(composition(torch.tensor([[2.0], [2.0]]), groups)[:, 0], 0.5, 0.5)  # the first epoch's mean stays
    again = Composition(["a"], {"a": {"bound": {}}})
    again.load_state_dict(composition.state_dict())
    same(again(torch.tensor([[2.0], [NAN]]), groups)[:, 0], 0.5, NAN)


def test_taming_follows_the_spread_with_hysteresis() -> None:
    assert spread(torch.tensor([1.0, 3.0, NAN])) == 0.5 and spread(torch.tensor([-1.0, -3.0])) == 0.5
    assert spread(torch.tensor([NAN])) == 0.0
    composition = Composition(["a", "b", "c"], {"a": {"tame": {}}, "b": {"tame": {}}}, 3, ["a", "b"])
    groups = torch.zeros(2, dtype=torch.int64)

    def run(wide: float) -> Tensor:  # a has h = wide, b has h = 1/2; the mean of the two is the limit
        return composition(torch.tensor([[1 - wide, 1.0, 5.0], [1 + wide, 3.0, 9.0]]), groups)

    same(run(0.8)[:, 0], math.log(1.2), math.log(2.8))
    same(run(0.8)[:, 1], 1, 3)
    same(run(0.45)[:, 0], math.log(1.55), math.log(2.45))  # below the mean, but not by a tenth of it
    same(run(0.2)[:, 0], 0.8, 1.2)
    assert composition.metrics()["tame/a"] == 0.0 and composition.metrics()["tame/b"] == 1.0
    assert composition.metrics()["tame/a/spread"] == pytest.approx(0.2)
    again = Composition(composition.names, composition.steps, 3, ["a", "b"])
    again.load_state_dict(composition.state_dict())
    assert again.tamed == composition.tamed


def test_steps_have_one_order_and_read_others_after_their_own_steps() -> None:
    scores = torch.tensor([[4.0, 0.2, 10.0], [9.0, 0.8, 20.0], [6.0, 0.9, NAN]])
    steps = {
        "a": {"gate": {"by": "b", "least": 1.0}, "log": {}, "clip": {"high": 6.0}},
        "b": {"threshold": {"at": 0.5}},
    }
    composed = Composition(["a", "b", "c"], steps, kept=1)(scores, torch.zeros(3, dtype=torch.int64))
    same(composed[:, 0], 0, math.log(7), math.log(7))  # clipped before the logarithm, gated by b's threshold
    assert composed.shape == (3, 1) and scores[1, 0] == 9  # the measured scores stay what they are
    whole = Composition(["a", "b", "c"], {"c": {"ensemble": {"others": ["a", "b"], "reduce": "min"}}})
    same(whole(scores, torch.zeros(3, dtype=torch.int64))[:, 2], 0.2, 0.8, NAN)


def test_no_steps_change_nothing() -> None:
    scores = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    torch.testing.assert_close(Composition(["a", "b"], {})(scores, torch.zeros(2)), scores, equal_nan=True)


@pytest.mark.parametrize("step", STEPS)
def test_no_step_makes_a_number_of_a_nan_or_a_nan_of_a_number(step: str) -> None:
    arguments = {"threshold": {"at": 0.0}, "ensemble": {"others": ["b"]}, "gate": {"by": "b", "least": 0.1}}
    arguments |= {"modulate": {"by": "b"}, "tame": {"delta": 0.1}}
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 2, generator=generator)
    scores[torch.rand(40, 2, generator=generator) < 0.4] = NAN
    composed = Composition(["a", "b"], {"a": {step: arguments.get(step, {})}})(scores, torch.arange(40) // 4)
    assert torch.equal(composed.isnan(), scores.isnan())


def test_a_ring_is_found() -> None:
    assert in_order({"a": {"gate": {"by": "b"}}, "b": {}}) == ["b", "a"]
    with pytest.raises(ValueError, match="a"):
        in_order({"a": {"gate": {"by": "b"}}, "b": {"ensemble": {"others": ["a"]}}, "c": {}})


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Writes a config with these rewards and watched ones; returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(rewards: dict, watch: dict | None = None, **more: object) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({"rewards": rewards, "watch": watch or {}, **more}))
        return path

    return write


def test_a_config_composes_and_survives_a_round_trip(write) -> None:  # type: ignore[no-untyped-def]
    shape = {"clip": {"low": 4, "high": 8}, "standardise": None, "gate": {"by": "ocr", "least": 0.9}}
    path = write({"aesthetic": {"shape": shape}, "clip": {}}, {"ocr": {}})
    config = load_config(path, ["rewards.clip.shape.log.scale=2"])
    assert config.rewards["aesthetic"].shape.steps() == {
        "clip": {"low": 4, "high": 8},
        "standardise": {},
        "gate": {"by": "ocr", "least": 0.9, "otherwise": 0.0},
    }
    assert config.rewards["clip"].shape.steps() == {"log": {"scale": 2}}
    dump(config, "again.yaml")
    assert load_config("again.yaml") == config
    assert load_config("again.yaml", ["rewards.clip.shape.log=null"]).rewards["clip"].shape.steps() == {}


def test_the_composition_of_a_config_reads_watched_rewards(write) -> None:  # type: ignore[no-untyped-def]
    from diffrl.run.parts import build_composition

    gate = {"gate": {"by": "ocr", "least": 0.5}}
    config = load_config(write({"aesthetic": {"shape": gate}}, {"clip": {}, "ocr": {}}))
    composition = build_composition(config)
    assert composition.names == ["aesthetic", "ocr"] and composition.kept == 1
    scores = torch.tensor([[5.0, 0.0], [6.0, 1.0]])
    same(composition(scores, torch.zeros(2, dtype=torch.int64))[:, 0], 0, 6)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"clip": {"low": 2, "high": 1}}, "rewards.a.shape.clip: low 2 is not below high 1"),
        ({"clip": {}}, "rewards.a.shape.clip: neither low nor high is given"),
        ({"gate": {"by": "ocrr"}}, '"ocrr" is neither under rewards nor under watch (nearest: "ocr")'),
        ({"gate": {"by": "a"}}, 'rewards.a.shape.gate.by: "a" names itself'),
        ({"gate": {"by": "b"}}, 'rewards.a.shape: "a" is read by what it reads itself'),
        ({"modulate": {"by": "ocr"}}, 'modulate: "a" is not declared to lie in [0, 1] (its card: -1 to 1); add bound'),
        ({"bound": {}, "modulate": {"by": "pickscore"}}, 'modulate.by: "pickscore" is not declared to lie in [0, 1]'),
        ({"log": {}, "tame": {}}, "rewards.a.shape.tame: log is on, too"),
        ({"ensemble": {}}, "rewards.a.shape.ensemble.others: name at least one"),
        ({"ensemble": {"others": ["ocr", "ocr"]}}, "a reward is named twice"),
        ({"log": {"scale": 0}}, "rewards.a.shape.log.scale: expected more than 0, got 0"),
        ({"standardize": {}}, 'unknown key (nearest: "rewards.a.shape.standardise")'),
        ({"gate": {"by": "ocr", "lesat": 1}}, 'unknown key (nearest: "rewards.a.shape.gate.least")'),
        ({"ensemble": {"others": ["ocr"], "reduce": "maen"}}, '(nearest: "mean")'),
    ],
)
def test_mistakes_are_named_at_their_key(write, shape: dict, message: str) -> None:  # type: ignore[no-untyped-def]
    rewards = {"a": {"plugin": "clip", "shape": shape}, "b": {"plugin": "ocr", "shape": {"gate": {"by": "a"}}}}
    with pytest.raises(UserError) as caught:
        load_config(write(rewards, {"ocr": {}, "pickscore": {}}))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_steps_that_could_have_no_effect_are_refused(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"watch\.ocr\.shape: no reward reads it"):
        load_config(write({"clip": {}}, {"ocr": {"shape": {"threshold": {}}}}))
    with pytest.raises(UserError, match=r'rewards\.clip\.shape: objective "direct" back-propagates'):
        load_config(write({"clip": {"shape": {"log": {}}}}, objective="direct"))
    with pytest.raises(UserError, match=r"rewards\.clip\.cache: d2align reads its embeddings"):
        load_config(write({"clip": {"cache": "scores"}}, d2align={}))


def test_the_help_shows_the_steps() -> None:
    text = help_config()
    assert text.count("\n      clip:") == text.count("        low: null") == 1, "once, not for each kind of reward"
    assert text.count("  NAME:\n") == 2, "a reward's, and a sibling's of evaluate.also"


def test_the_guides_config_is_a_config(write) -> None:  # type: ignore[no-untyped-def]
    guide = (Path(__file__).parents[2] / "rewards" / "README.md").read_text(encoding="utf-8")
    block = guide.split("```yaml\n")[1].split("```")[0]
    config = load_config(write(**yaml.safe_load(block)))
    assert config.rewards["pickscore"].shape.steps().keys() == {"standardise", "ensemble"}
