"""The experiments behind the pages' figures: each can be run, and none is run again without a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.league import experiments as asked_for
from experiments.league import running
from experiments.league.experiments import Experiment, linked, plain
from experiments.league.results import merge
from experiments.listed import experiments

EVERY = experiments()


def test_every_config_is_valid_its_seeds_differ_and_no_micro_batch_is_left_to_the_estimate_of_memory() -> None:
    for experiment in EVERY:
        names = {experiment.name_of(seed) for seed in experiment.seeds}
        enough = 1 if experiment.name.startswith("pilots/") else 3
        assert len(names) == len(experiment.seeds) >= enough, experiment.name
        assert experiment.read.optimise.micro_batch != "auto", experiment.name


def test_no_two_are_the_same() -> None:
    assert len({json.dumps(experiment.asked(), sort_keys=True) for experiment in EVERY}) == len(EVERY)


def test_axes_are_an_entry_for_each_combination() -> None:
    found = {one.name: one for one in EVERY if one.name.startswith("pilots/srpo_")}
    rates = {name.partition("_")[2]: one.read.optimise.learning_rate for name, one in found.items()}
    assert len(rates) == 5 and all(float(text) == rate for text, rate in rates.items())


@pytest.fixture
def one(tmp_path: Path) -> Experiment:
    """An experiment with a result of seeds 0 and 1, as `asked` gives it."""
    one = next(each for each in EVERY if each.name == "gardo/clip_gardo")
    return replace(one, name="one", seeds=(0, 1), out=tmp_path / "one.json")


def result(experiment: Experiment, **config: Any) -> dict[str, Any]:
    asked = experiment.asked()
    return asked | {"config": asked["config"] | config, "runs": [{"seed": 0}, {"seed": 1}]}


def test_a_seed_stands_as_long_as_what_is_asked(one: Experiment) -> None:
    assert one.kept() == {}, "nothing was run"
    one.out.write_text(json.dumps(result(one)))
    assert sorted(one.kept()) == [0, 1] and one.state() == ("done", 0.0)
    assert sorted(replace(one, seeds=(1, 2)).kept()) == [1]
    other = replace(one, overrides=(*one.overrides, "epochs=7"))
    assert other.kept() == {} and other.state() == ("other config", 2 * one.minutes)
    assert replace(one, settings={"prompts": 8, "per_prompt": 4}).differences(result(one)) == ["prompts"]


def test_a_key_that_a_result_lacks_has_its_default(one: Experiment) -> None:
    told = result(one)
    del told["config"]["optimise"]["max_grad_norm"]
    assert one.differences(told) == []
    told["config"]["rewards"]["clip"]["param"] = 1  # a reward's own, which the schema does not know
    assert one.differences(told) == ["config"]
    assert one.differences(result(one, epochs="many")) == ["config"]


@pytest.mark.parametrize("change", [{"rehearsal": None}, {"never": 1}, {"objective": "none"}, {"nft": {"never": 1}}])
def test_a_key_that_is_gone_is_another_config(one: Experiment, change: dict[str, Any]) -> None:
    assert one.differences(result(one, **change)) == ["config"]


def test_a_merged_seed_stands(one: Experiment, tmp_path: Path) -> None:
    run = {"seed": 0, "before": {"clip": 0.5}, "after": {"clip": 0.6}}
    part = tmp_path / "part.json"
    part.write_text(json.dumps(result(one) | {"runs": [run]}))
    merge(one, part, "command", {})
    assert one.kept() == {0: run}


def test_a_result_is_small_and_says_what_it_is_of() -> None:
    for experiment in EVERY:
        if experiment.out.is_file():
            told = json.loads(experiment.out.read_text())
            assert {"command", "diffrl_version", "config", "prompts", "per_prompt", "runs"} <= told.keys()
            assert all(run["commit"] and not run.keys() & {"code", "digest"} for run in told["runs"]), experiment.name


def test_what_builds_on_other_runs_is_trained_after_them_in_their_folders(tmp_path: Path, monkeypatch: Any) -> None:
    """Each distilled seed gets the LoRAs of its own seed's teachers; the result names the runs, not the folders."""
    student = next(each for each in EVERY if each.name == "marble/distilled")
    chosen = linked([replace(one, seeds=(0,), out=tmp_path / one.name) for one in (student, *student.after.values())])
    trained: list[str] = []

    def run(file: Path) -> None:
        task = json.loads(file.read_text())
        config = plain(asked_for.load_config(task["config"], task["overrides"]).resolved())
        told = {"config": config, "runs": [{"seed": 0, "after": {}, "before": {}}]}
        Path(task["out"]).write_text(json.dumps(told))
        trained.append(json.dumps(config.get("opd", {})))

    def run_jobs(jobs: Any, *_: Any, **__: Any) -> list[Any]:
        for job in jobs:
            run(Path(job.command[-1]))
            job.done()
        return []

    monkeypatch.setattr(running, "run_jobs", run_jobs)
    runs = tmp_path / "runs"
    assert running.run_all(chosen, 1, runs, lambda experiment: "command") == 0
    folders = [str(one.folder(0, runs)) for one in student.after.values()]
    assert len(folders) == 5 and all(folder in trained[5] and folder not in trained[0] for folder in folders)
    told = json.loads(chosen[0].out.read_text())
    assert told["config"]["opd"]["teachers"]["ocr"]["lora"] == "RUN(marble/teacher_ocr)"
    assert sorted(chosen[0].kept()) == [0]
