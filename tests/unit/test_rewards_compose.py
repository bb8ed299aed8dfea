"""What becomes of scores before they are optimised: each step, their order, and what a config may say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from diffrl.cli.config_help import help_config
from diffrl.config import dump, load_config
from diffrl.errors import UserError
from diffrl.rewards.compose import ScoreTransform
from diffrl.rewards.order import STEPS, in_order
from diffrl.rewards.steps import bound, clip, confidence, modulate

NAN = math.nan
SCORES = torch.tensor([-2.0, 0.0, NAN, 1.0, 5.0, NAN])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def same(result: Tensor, *expected: float) -> None:
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32), equal_nan=True)


def test_clip_holds_scores_within_bounds() -> None:
    same(clip(SCORES, -1, 3), -1, 0, NAN, 1, 3, NAN)
    same(clip(SCORES, low=0), 0, 0, NAN, 1, 5, NAN)


def test_base_and_bonus_are_multiplied() -> None:
    base, bonus = torch.tensor([0.0, 1.0, 0.5, 0.5, NAN, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.5, 0.3, NAN])
    same(modulate(base, bonus, base=0.4), 0, 0.4, 0.5, 0.35, NAN, 1)
    same(modulate(base, bonus, base=1.0), 0, 1, 0.5, 0.5, NAN, 1)
    grid = torch.linspace(0, 1, 11)
    table = modulate(grid[:, None].expand(11, 11), grid.expand(11, 11))
    assert (table.diff(dim=0) >= 0).all() and (table.diff(dim=1) >= 0).all() and (table[0] == 0).all()


def test_a_judge_that_disagrees_takes_the_signal_away() -> None:
    """By its definition; all of one mind, or nothing known: as it was; the disputed image loses most."""
    column = torch.tensor([1.0, 2.0, 3.0, 4.0, NAN, 7.0, 9.0])
    by = torch.tensor([0.1, 0.2, 0.4, 0.3, 0.5, NAN, 2.0])
    groups = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    found = confidence(column, by, groups)
    # Win rates in group 0: 0, 1/3, 2/3, 1 against 0, 1/4, 3/4, 1/2 (of five); in group 1 the last: 1 against 1/2.
    gaps = torch.tensor([0, 1 / 3 - 1 / 4, 3 / 4 - 2 / 3, 1 / 2, 1 / 2], dtype=torch.float64)
    trust = (-gaps / gaps.std(correction=0)).exp()
    expected = [2.5 + (v - 2.5) * float(t) for v, t in zip((1, 2, 3, 4), trust, strict=False)]
    same(found, *expected, NAN, 7.0, 8.0 + 1.0 * float(trust[4]))
    assert abs(found[3] - 2.5) < abs(found[0] - 2.5), "the best by one judge alone"
    same(confidence(column, column * 3 + 1, groups), *column.tolist())
    same(confidence(column, torch.full((7,), NAN), groups), *column.tolist())
    composed = ScoreTransform(["a", "b"], {"a": {"confidence": {"by": "b"}}}, 1)(torch.stack([column, by], 1), groups)
    same(composed[:, 0], *found.tolist())
    assert in_order({"a": {"confidence": {"by": "b"}}, "b": {"modulate": {"by": "c"}}, "c": {}}) == ["c", "b", "a"]


def test_a_bounded_reward_is_one_half_at_its_reference() -> None:
    same(bound(torch.tensor([2.0, 4.0, NAN]), at=2.0, scale=2.0), 0.5, 1 / (1 + math.exp(-1)), NAN)
    composition = ScoreTransform(["a"], {"a": {"bound": {}}})
    groups = torch.zeros(2, dtype=torch.int64)
    first = composition(torch.tensor([[1.0], [3.0]]), groups)
    same(first[:, 0], 1 / (1 + math.e), math.e / (1 + math.e))
    same(composition(torch.tensor([[2.0], [2.0]]), groups)[:, 0], 0.5, 0.5)  # the first epoch's mean stays
    again = ScoreTransform(["a"], {"a": {"bound": {}}})
    again.load_state_dict(composition.state_dict())
    same(again(torch.tensor([[2.0], [NAN]]), groups)[:, 0], 0.5, NAN)


def test_steps_have_one_order_and_read_others_after_their_own_steps() -> None:
    scores = torch.tensor([[4.0, -0.2, 10.0], [9.0, 1.8, 20.0], [6.0, 1.9, NAN]])
    steps = {
        "a": {"modulate": {"by": "b", "base": 0.0}, "bound": {"at": 5.0}, "clip": {"high": 6.0}},
        "b": {"clip": {"low": 0.0, "high": 1.0}},
    }
    composed = ScoreTransform(["a", "b", "c"], steps, returned=1)(scores, torch.zeros(3, dtype=torch.int64))
    same(composed[:, 0], 0, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-1)))  # clipped before bounded, times b, clipped
    assert composed.shape == (3, 1) and scores[1, 0] == 9  # the measured scores stay what they are


def test_no_steps_change_nothing() -> None:
    scores = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    torch.testing.assert_close(ScoreTransform(["a", "b"], {})(scores, torch.zeros(2)), scores, equal_nan=True)


@pytest.mark.parametrize("step", STEPS)
def test_no_step_makes_a_number_of_a_nan_or_a_nan_of_a_number(step: str) -> None:
    arguments = {"modulate": {"by": "b"}, "confidence": {"by": "b"}}
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 2, generator=generator)
    scores[torch.rand(40, 2, generator=generator) < 0.4] = NAN
    composed = ScoreTransform(["a", "b"], {"a": {step: arguments.get(step, {})}})(scores, torch.arange(40) // 4)
    assert torch.equal(composed.isnan(), scores.isnan())


def test_a_ring_is_found() -> None:
    assert in_order({"a": {"modulate": {"by": "b"}}, "b": {}}) == ["b", "a"]
    with pytest.raises(ValueError, match="a"):
        in_order({"a": {"modulate": {"by": "b"}}, "b": {"modulate": {"by": "a"}}, "c": {}})


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
    shape = {"clip": [0, 1], "bound": None, "modulate": {"by": "ocr", "base": 0.9}}
    path = write({"aesthetic": {"shape": shape}, "clip": {}}, {"ocr": {}})
    config = load_config(path, ["rewards.clip.shape.bound.scale=2"])
    assert config.rewards["aesthetic"].shape.steps() == {
        "clip": {"low": 0, "high": 1},
        "bound": {"scale": 1.0},
        "modulate": {"by": "ocr", "base": 0.9},
    }
    assert config.rewards["clip"].shape.steps() == {"bound": {"scale": 2}}
    dump(config, "again.yaml")
    assert load_config("again.yaml") == config
    assert load_config("again.yaml", ["rewards.clip.shape.bound=null"]).rewards["clip"].shape.steps() == {}


def test_the_composition_of_a_config_reads_watched_rewards(write) -> None:  # type: ignore[no-untyped-def]
    from diffrl.run.build import build_composition

    shape = {"bound": {"at": 5.0}, "modulate": {"by": "ocr", "base": 0.0}}
    config = load_config(write({"aesthetic": {"shape": shape}}, {"clip": {}, "ocr": {}}))
    composition = build_composition(config)
    assert composition.names == ["aesthetic", "ocr"] and composition.returned == 1
    scores = torch.tensor([[5.0, 0.0], [5.0, 1.0]])
    same(composition(scores, torch.zeros(2, dtype=torch.int64))[:, 0], 0, 0.5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"clip": [2, 1]}, "rewards.a.shape.clip: [2, 1]: the first is not below the second"),
        ({"clip": [None, None]}, "rewards.a.shape.clip: [null, null] bounds nothing"),
        ({"clip": {"high": 1}}, "rewards.a.shape.clip: expected a list of two such as [1, 2], got a section"),
        ({"modulate": {"by": "ocrr"}}, '"ocrr" is neither under rewards nor under watch (nearest: "ocr")'),
        ({"modulate": {"by": "a"}}, 'rewards.a.shape.modulate.by: "a" names itself'),
        ({"confidence": {"by": "ocrr"}}, '"ocrr" is neither under rewards nor under watch (nearest: "ocr")'),
        ({"bound": {}, "modulate": {"by": "b"}}, 'rewards.a.shape: "a" is read by what it reads itself'),
        ({"modulate": {"by": "ocr"}}, 'modulate: "a" is not declared to lie in [0, 1] (its card: -1 to 1); add shape'),
        ({"bound": {}, "modulate": {"by": "pickscore"}}, 'modulate.by: "pickscore" is not declared to lie in [0, 1]'),
        ({"bound": {"scale": 0}}, "rewards.a.shape.bound.scale: expected more than 0, got 0"),
        ({"bounds": {}}, 'unknown key (nearest: "rewards.a.shape.bound")'),
        ({"modulate": {"by": "ocr", "bsae": 1}}, 'unknown key (nearest: "rewards.a.shape.modulate.base")'),
    ],
)
def test_mistakes_are_named_at_their_key(write, shape: dict, message: str) -> None:  # type: ignore[no-untyped-def]
    rewards = {"a": {"plugin": "clip", "shape": shape}, "b": {"plugin": "ocr", "shape": {"modulate": {"by": "a"}}}}
    with pytest.raises(UserError) as caught:
        load_config(write(rewards, {"ocr": {}, "pickscore": {}}))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_steps_that_could_have_no_effect_are_refused(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"watch\.ocr\.shape: no reward reads it"):
        load_config(write({"clip": {}}, {"ocr": {"shape": {"bound": {}}}}))
    with pytest.raises(UserError, match=r'rewards\.clip\.shape: objective "direct" back-propagates'):
        load_config(write({"clip": {"shape": {"bound": {}}}}, objective="direct"))
    with pytest.raises(UserError, match=r"rewards\.clip\.cache: d2align reads its embeddings"):
        load_config(write({"clip": {"cache": "scores"}}, d2align={}))


def test_the_help_shows_the_steps() -> None:
    text = help_config()
    assert text.count("\n      clip: null") == text.count("        base: 0.4") == 1, "once, not for each kind of reward"
    assert text.count("  NAME:\n") == 3, "a reward's, a student's of evaluate.also, and a teacher's of opd"


def test_the_guides_config_is_a_config(write) -> None:  # type: ignore[no-untyped-def]
    guide = (Path(__file__).parents[2] / "rewards" / "README.md").read_text(encoding="utf-8")
    block = guide.split("```yaml\n")[1].split("```")[0]
    config = load_config(write(**yaml.safe_load(block)))
    assert config.rewards["pickscore"].shape.steps().keys() == {"bound", "modulate"}
