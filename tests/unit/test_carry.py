"""A result is carried over a change of the code only where a short training shows that nothing of it changed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import carry
import experiments
from carry import Trained, carried, differences, outdated, timeless
from experiments import code_of, kept

ONE = replace(experiments.experiments()[0], name="one", seeds=(0, 1))
FILES = ["diffrl/advantages.py"]


def short(lora: str = "a", after: float = 0.5, **metrics: Any) -> Trained:
    run = {"seed": 0, "before": {"x": 0.1}, "after": {"x": after}, "code": FILES}
    return Trained({"runs": [run]}, lora, [{"epoch": 1, "loss": 0.25} | metrics])


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result of two seeds whose code is not today's."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    runs = [{"seed": seed, "code": FILES, "digest": "of then", "after": {"x": 0.9}} for seed in (0, 1)]
    ONE.out.write_text(json.dumps({"summary": {"x": 1}, "runs": runs}))
    return ONE.out


def test_only_times_may_differ() -> None:
    assert timeless({"loss": 1.0, "seconds": 2.0, "seconds/rollout": 1.0}) == {"loss": 1.0}
    assert differences(short(), short()) == []
    assert differences(short(), short(fresh_column=1)) == [], "what only today's code logs"
    assert differences(short(fresh_column=1), short()) == ["fresh_column"], "what it no longer logs"
    assert differences(short(), short(lora="b", after=0.6, loss=0.26)) == ["after", "LoRA", "loss"]
    longer = replace(short(), metrics=[*short().metrics, {"epoch": 2}])
    assert differences(short(), longer) == ["epochs"]


def test_only_what_was_of_that_code_is_tried(result: Path) -> None:
    assert outdated(ONE, [0, 1]) and not outdated(ONE, [0]) and not outdated(ONE, [])
    assert not outdated(replace(ONE, name="not run"), [0, 1])


def test_all_seeds_are_of_today_s_code_then_and_their_figures_stay(result: Path) -> None:
    told = json.loads(result.read_text())
    new = carried(ONE, short(), "abc1234", epochs=3)
    assert [run["digest"] for run in new["runs"]] == [ONE.digest(seed, code_of(FILES)) for seed in (0, 1)]
    assert [run["after"] for run in new["runs"]] == [run["after"] for run in told["runs"]]
    assert new["carried"] == {"from": "abc1234", "epochs": 3, "seed": 0} and new["summary"] == told["summary"]
    result.write_text(json.dumps(new))
    assert sorted(kept(ONE)) == [0, 1] and not outdated(ONE, [0, 1])


@pytest.mark.parametrize("lora", ["a", "b"])
def test_it_is_written_only_where_both_are_equal(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lora: str
) -> None:
    sides = iter([short(), short(lora=lora)])
    monkeypatch.setattr(carry, "trained", lambda *given: next(sides))
    before = result.read_text()
    assert carry.carry(ONE, tmp_path, tmp_path, "abc1234", 3) == (lora == "a")
    assert (result.read_text() != before) == (lora == "a")
    assert capsys.readouterr().out == {"a": "one: equal\n", "b": "one: not as before: LoRA\n"}[lora]
