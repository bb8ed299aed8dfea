"""Files that are valid JSON, YAML or UTF-8 and not what diffrl writes: one line that names them, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from test_report import make_run

from diffrl import report
from diffrl.config import find_config, load_config
from diffrl.divgen.score import load_scores
from diffrl.divgen.scoring import read_job
from diffrl.errors import UserError
from diffrl.policy.pipelines import settings_of
from diffrl.prompts import load_prompts
from diffrl.records import checkpoint, history, saving
from diffrl.records.checkpoint import NewerError
from diffrl.records.lock import FolderLock
from diffrl.records.saving import CheckpointError
from diffrl.records.tracking import read_metrics, record_environment
from diffrl.report import compare

ODD = ["null", "3", "[]", "{}", "[1]", "[[]]", '"a"', "1e999", '{"epoch": []}', "[" * 100_000, '{"a": ' * 5_000]


def saved(folder: Path) -> Path:
    return saving.save(folder, 1, {"lora": {"a": torch.ones(2)}}, {"epoch": 1}, keep=1, identity={"a": 1})


@pytest.mark.usefixtures("blank_charts")
@pytest.mark.parametrize("text", some(ODD, "null", "[[]]", '{"epoch": []}', "[" * 100_000))
def test_odd_json_in_a_runs_folder_is_one_line(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run")
    for name in ("config.yaml", "environment.json", "d2align/evidence.json", "gardo/epoch-0001.json"):
        file = run / name
        before = file.read_bytes() if file.is_file() else None
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        told(lambda: report.write_report(run))
        told(lambda: compare.write_comparison([run, make_other(tmp_path)], tmp_path / "c.html"))
        file.unlink() if before is None else file.write_bytes(before)
    file = run / "environment.json"
    file.write_text(text)
    record_environment(run)
    assert json.loads(file.read_text())[-1]["versions"]
    (run / history.NAME).write_text(f'{text}\n{{"identity": 3}}\n')
    assert history.identity_at_start(run) is None and not history.had_checkpoint(run)
    (run / "metrics.jsonl").write_text(f'{text}\n{{"epoch": 1}}\n')
    with pytest.raises(UserError, match="line 1: not a JSON object with an epoch"):
        read_metrics(run)


def make_other(folder: Path) -> Path:
    return folder / "other" if (folder / "other").is_dir() else make_run(folder / "other")


def told(work: Callable[[], Any]) -> None:
    """Done, or refused in words."""
    try:
        work()
    except UserError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    "section",
    ["rewards: 3", "rewards: {a: 3}", "watch: [a]", "evaluate: {also: 3}", "evaluate: [1]", "prompts: x", "lora: [1]",
     "epochs: many", "model: [1]", "gardo: 3", "objective: {}"],
)  # fmt: skip
def test_odd_sections_in_a_runs_config_are_one_line(tmp_path: Path, section: str) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text(section)
    told(lambda: report.write_report(run))


@pytest.mark.parametrize("value", ["1" + "0" * 400, "[]", '"x"', "{}", "true"])
def test_odd_metrics_are_one_line(tmp_path: Path, value: str) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        for epoch in (90, 91):
            pairs = ", ".join(f'"{key}": {value}' for key in ("samples", "seconds", "eval/gold", "loss", "diversity"))
            file.write(f'{{"epoch": {epoch}, "eval/diversity": 0.5, {pairs}}}\n')
    told(lambda: report.write_report(run))


@pytest.mark.parametrize("text", ODD)
def test_odd_manifests_of_checkpoints_are_damage(tmp_path: Path, text: str) -> None:
    path = saved(tmp_path)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.load(path)
    assert checkpoint.survey(tmp_path)[0] is None


@pytest.mark.parametrize(
    "files",
    [{}, [], 3, {"state.json": 1}, {"state.json": {}}, {"../x": {"size": 0, "sha256": ""}}, {"lora.safetensors": {}}],
)
def test_a_manifest_that_lists_nothing_is_not_intact(tmp_path: Path, files: Any) -> None:
    path = saved(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.load(path)


def test_a_checkpoint_of_a_later_version_is_not_passed_over(tmp_path: Path) -> None:
    path = saved(tmp_path)
    later = path.with_name("step-000002")
    shutil.copytree(path, later)
    manifest = json.loads((path / "manifest.json").read_text())
    (later / "manifest.json").write_text(json.dumps({**manifest, "format": 2, "diffrl": "9.0.0"}))
    with pytest.raises(NewerError, match=r"format 2, written by diffrl 9.0.0; this is diffrl .*: use that version"):
        checkpoint.survey(tmp_path)
    (later / "manifest.json").write_text("{}")
    found, damaged = checkpoint.survey(tmp_path)
    assert found == path and len(damaged) == 1


@pytest.mark.parametrize("text", [odd for odd in ODD if odd != "1e999"])
def test_odd_states_are_one_line(tmp_path: Path, text: str) -> None:
    path = saved(tmp_path)
    (path / "state.json").write_text(text)
    with pytest.raises(UserError, match=r"state.json: "):
        checkpoint.epoch_of(path)
    (path / "manifest.json").write_text('{"identity": 3}')
    assert checkpoint.identity_of(path) is None


@pytest.mark.parametrize("text", ODD)
def test_odd_files_elsewhere_are_one_line(tmp_path: Path, text: str) -> None:
    for name, read in (
        ("job.json", lambda: read_job(tmp_path)),
        ("scores.json", lambda: load_scores(tmp_path / "scores.json")),
        ("diffrl.json", lambda: settings_of(str(tmp_path))),
        ("prompts.jsonl", lambda: load_prompts(str(tmp_path / "prompts.jsonl"))),
        ("run.yaml", lambda: load_config(find_config(tmp_path / "run.yaml"))),
    ):
        (tmp_path / name).write_text(text)
        told(read)
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").write_text(text)
    told(lambda: FolderLock(tmp_path / "locked", beat=0.1, patience=0.2).take())


@pytest.mark.parametrize(
    "line", ['{"prompt": "a \\ud800"}', '{"prompt": "a", "tag": "\\udfff"}', '{"prompt": "a", "n": ' + "1" * 5000 + "}"]
)
def test_prompts_that_are_no_text_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(UserError, match=r"p.jsonl:1: (half of a surrogate pair|not valid JSON)"):
        load_prompts(str(tmp_path / "p.jsonl"))
