"""The experiments behind the pages' figures: each can be run, and none is run again without a reason."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import experiments
from experiments import Experiment, code_of, confirmed, kept, meaning

EVERY = experiments.experiments()


@pytest.mark.parametrize("experiment", EVERY, ids=[experiment.name for experiment in EVERY])
def test_its_config_is_valid_and_its_seeds_differ(experiment: Experiment) -> None:
    digests = {experiment.digest(seed, "") for seed in experiment.seeds}
    assert len(digests) == len(experiment.seeds) >= (1 if experiment.name.startswith("pilots/") else 3)


def test_no_two_are_the_same_and_no_name_is_another_s_folder() -> None:
    assert len({experiment.digest(0, "") for experiment in EVERY}) == len({experiment.name for experiment in EVERY})


def test_code_is_compared_without_comments_docstrings_and_layout(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(experiments, "ROOT", tmp_path)
    digests = []
    for text in (
        'def f(x):\n    """Doc."""\n    return x + 1\n',
        'def f(x):  # comment\n    """Other."""\n    return (x +\n            1)\n',
        'def f(x):\n    """Doc."""\n    return x - 1\n',
    ):
        (tmp_path / "one.py").write_text(text)
        meaning.cache_clear()
        digests.append(meaning("one.py"))
    meaning.cache_clear()
    assert digests[0] == digests[1] != digests[2] and meaning("gone.py") == ""


def test_a_seed_stands_as_long_as_what_it_depends_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    files = ["diffrl/advantages.py"]
    one = replace(EVERY[0], name="one")
    runs = [{"seed": seed, "code": files, "digest": one.digest(seed, code_of(files))} for seed in (0, 1)]
    assert kept(one) == {}, "nothing was run"
    one.out.write_text(json.dumps({"runs": runs}))
    assert sorted(kept(one)) == [0, 1]
    assert sorted(kept(replace(one, seeds=(1, 2)))) == [1]
    assert kept(replace(one, overrides=(*one.overrides, "epochs=7"))) == {}, "another config"
    assert kept(replace(one, settings={"prompts": 8})) == {}, "other prompts of the judgement"
    monkeypatch.setattr(experiments, "meaning", lambda path: "other")
    assert kept(one) == {}, "other code"


def test_a_result_is_confirmed_only_by_the_same_figures_of_the_same_config(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    one = replace(EVERY[0], name="one", seeds=(0, 1))

    def run(seed: int, code: list[str], after: float) -> dict:
        return {"seed": seed, "code": code, "after": {"clip": after}, "digest": "old", "training_seconds": after}

    config = {"epochs": 2, "seed": 0, "run_dir": "a"}
    told = {"runs": [run(0, ["old.py"], 0.5), run(1, ["old.py"], 0.7)], "config": config, "summary": {}}
    again = {"runs": [run(0, ["diffrl/advantages.py"], 0.5)], "config": config | {"run_dir": "b"}}
    one.out.write_text(json.dumps(confirmed(one, told, again)))
    assert sorted(kept(one)) == [0, 1] and json.loads(one.out.read_text())["confirmed_by_seed"] == 0
    assert [part["after"] for part in kept(one).values()] == [{"clip": 0.5}, {"clip": 0.7}]
    with pytest.raises(ValueError, match=r"one: not as before: after$"):
        confirmed(one, told, again | {"runs": [run(0, [], 0.5 + 1e-12)]})
    with pytest.raises(ValueError, match=r"not as before: config$"):
        confirmed(one, told, again | {"config": config | {"epochs": 3}})


def test_what_only_looks_on_makes_no_result_outdated() -> None:
    for module in ("diffrl.report.page", "diffrl.run.fit", "diffrl.run.loop"):
        importlib.import_module(module)
    files = experiments.loaded()
    assert "diffrl/run/loop.py" in files and files == sorted(files)
    assert [file for file in files if file.startswith(experiments.ONLOOKERS)] == []
    assert all((experiments.ROOT / name).exists() for name in experiments.ONLOOKERS)


@pytest.mark.parametrize("experiment", EVERY, ids=[experiment.name for experiment in EVERY])
def test_no_micro_batch_is_left_to_the_estimate_of_memory(experiment: Experiment) -> None:
    config = experiments.load_config(experiments.ROOT / experiment.config, list(experiment.overrides))
    assert config.optimise.micro_batch != "auto"
