"""`diffrl sweep`: what it runs, how it goes on, and what it says where something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.records import checkpoint
from diffrl.records.history import read_history
from diffrl.records.lock import FolderLock
from diffrl.records.tracking import read_metrics
from diffrl.run.interrupt import Interrupted
from diffrl.sweep import cluster
from diffrl.sweep import jobs as jobs_module
from diffrl.sweep.jobs import Job, run_jobs
from diffrl.sweep.plan import plan, read_axis, settle


def job(tmp_path: Path, name: str, code: str, **more) -> Job:
    return Job(name, [sys.executable, "-c", code], tmp_path / f"{name}.log", **more)


def run(listed: list[Job], at_once: int = 1, one_thread: bool = False) -> tuple[list[Job], list[str]]:
    lines: list[str] = []
    return run_jobs(listed, at_once, one_thread, lines.append), lines


def test_a_failure_is_one_line_with_exit_code_reason_and_log_and_stops_no_other(tmp_path: Path) -> None:
    done: list[str] = []
    listed = [
        job(tmp_path, "good", "print(1)", done=lambda: done.append("good")),
        job(
            tmp_path,
            "bad",
            "import sys; print('x'); sys.exit('diffrl: error: no room')",
            done=lambda: done.append("bad"),
        ),
        job(tmp_path, "mute", "import os; os.kill(os.getpid(), 9)"),
        job(tmp_path, "last", "", done=lambda: done.append("last")),
    ]
    failed, lines = run(listed)
    assert [one.name for one in failed] == ["bad", "mute"] and done == ["good", "last"]
    assert lines == [
        "[1/4] good: done",
        f"[2/4] bad: failed with exit code 1 (no room); log: {tmp_path / 'bad.log'}",
        f"[3/4] mute: failed with exit code -9; log: {tmp_path / 'mute.log'}",
        "[4/4] last: done",
    ]
    assert (tmp_path / "good.log").read_text() == "1\n"


def test_as_many_at_a_time_as_asked_each_on_a_gpu_and_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    show = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('OMP_NUM_THREADS'), time.time());"
    show += "time.sleep(0.5); print(time.time())"
    assert not run([job(tmp_path, name, show) for name in "abcd"], at_once=2, one_thread=True)[0]
    told = {name: (tmp_path / f"{name}.log").read_text().split() for name in "abcd"}
    assert sorted(words[0] for words in told.values()) == ["3", "3", "GPU-5", "GPU-5"]
    assert {words[1] for words in told.values()} == {"1"}
    spans = [(float(words[2]), float(words[3])) for words in told.values()]
    assert all(sum(begin <= at < end for begin, end in spans) <= 2 for at, _ in spans)
    assert not run([job(tmp_path, "e", show)])[0]  # one at a time finds both GPUs, and all threads
    assert (tmp_path / "e.log").read_text().split()[:2] == ["3,GPU-5", "None"]


def test_a_signal_is_passed_on_and_nothing_more_is_begun(tmp_path: Path) -> None:
    wait = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up', flush=True); time.sleep(60)"
    )
    first = job(tmp_path, "first", wait)
    lines: list[str] = []

    def end() -> None:
        while not first.log.is_file() or not first.log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    with pytest.raises(Interrupted):
        run_jobs([first, job(tmp_path, "second", "")], 1, False, lines.append)
    assert lines == ["[1/2] first: saved"] and not (tmp_path / "second.log").exists()


def test_a_run_that_a_killed_sweep_left_behind_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has one writer at a time, and it counts as one of the runs at a time."""
    monkeypatch.setattr(jobs_module, "LOOK", 0.1)
    folder, begun = tmp_path / "run", []
    (owner := FolderLock(folder, beat=0.1)).__enter__()
    (folder / "x").touch()
    threading.Timer(0.6, lambda: (begun.append((tmp_path / "mine.log").exists()), owner.__exit__())).start()
    failed, lines = run([job(tmp_path, "mine", "", folder=folder)])
    assert not failed and begun == [False] and lines[-1] == "[1/1] mine: done"
    assert lines[0].startswith(f"mine: waits, for process {os.getpid()} on ")


def test_values_of_a_key() -> None:
    assert read_axis("nft.beta=0.1, 1.0") == ("nft.beta", ["0.1", "1.0"])
    assert read_axis("lora.targets=[a,b],[c]") == ("lora.targets", ["[a,b]", "[c]"])
    assert read_axis('a.b="x,y",{c: 1, d: 2}') == ("a.b", ['"x,y"', "{c: 1, d: 2}"])


def test_every_config_in_every_variation_with_every_seed(config_file, tmp_path: Path) -> None:
    one, other = str(config_file("one")), str(config_file("two"))
    axes = {"optimise.learning_rate": ["1e-3", "1e-2"], "rollout.steps": ["3", "5"]}
    members = plan([one, other], ["epochs=5"], axes, 2, tmp_path / "out")
    assert len(members) == 2 * 4 * 2 and {member.config.epochs for member in members} == {5}
    assert [(m.name, m.seed) for m in members[:3]] == [
        ("one-learning_rate=1e-3-steps=3", 0),
        ("one-learning_rate=1e-3-steps=3", 1),
        ("one-learning_rate=1e-3-steps=5", 0),
    ]
    last = members[-1]
    assert (last.config.optimise.learning_rate, last.config.rollout.steps) == (0.01, 5)
    assert last.folder == tmp_path / "out" / "two-learning_rate=1e-2-steps=5" / "seed-1"
    assert not (tmp_path / "out").exists(), "a plan writes nothing"
    settle(members)
    again = load_config(last.job.command[4], list(last.job.command[5:7]))
    assert (again.seed, Path(again.run_dir)) == (1, last.folder) and again.optimise == last.config.optimise


def test_a_changed_config_is_refused_and_more_epochs_go_on(config_file, tmp_path: Path) -> None:
    source, out = str(config_file("one")), tmp_path / "out"
    settle(plan([source], [], {}, 1, out))
    settle(plan([source], ["rollout.steps=5"], {}, 1, out))  # nothing has trained yet
    run_dir = out / "one" / "seed-0"
    run_dir.mkdir()
    (out / "one" / "seed-0.log").touch()
    (run_dir / "metrics.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n')
    before = (out / "one" / "config.yaml").read_text()
    for change, text in (
        ("rollout.steps=3", "rollout.steps 5, and it is 3 now"),
        ("epochs=2", "epochs 3, and it is 2"),
    ):
        overrides = ["rollout.steps=5", change]
        assert main(["sweep", source, *overrides, "--seeds", "1", "--out", str(out)]) == 2
        with pytest.raises(ValueError, match=text):
            settle(plan([source], overrides, {}, 1, out))
    assert (out / "one" / "config.yaml").read_text() == before
    more = plan([source], ["rollout.steps=5", "epochs=4"], {}, 1, out)
    assert settle(more) == ["one: 3 epochs before, 4 now: its runs go on"] and not more[0].finished


def test_a_run_is_done_when_it_says_so_whatever_the_clock_did(config_file, tmp_path: Path) -> None:
    """Times of files were compared: after a clock had gone back in a run, its sweep was never done."""
    (member,) = plan([str(config_file("one", epochs=1))], [], {}, 1, tmp_path / "out")
    settle([member])
    assert not member.finished and main(list(member.job.command[3:])) == 0 and member.finished
    year = time.time() + 365 * 86400
    os.utime(member.folder / "metrics.jsonl", (year, year))
    assert member.finished
    (member.folder / "exit_code").unlink()  # killed while it wrote its report
    assert not member.finished


@pytest.mark.parametrize(
    "words, text",
    [
        ("", "sweep: no CONFIG"),
        ("CONFIG --vary nft.beta", '--vary: "nft.beta": write section.key=a,b'),
        ("CONFIG --vary nft.beta=1,,2", "write section.key=a,b"),
        ("CONFIG --vary nft.beta=1,2,1", "1 stands there twice"),
        ("CONFIG --vary nft.beta=1 --vary nft.beta=2", "--vary: a key is given twice"),
        ("CONFIG --vary nft.bta=1,2", 'command line: nft.bta: unknown key (nearest: "nft.beta")'),
        ("CONFIG --vary seed=1,2", "seed: a sweep sets it itself: --seeds N"),
        ("CONFIG run_dir=x", "run_dir: a sweep sets it itself: --out FOLDER"),
        ("CONFIG CONFIG", "is given twice"),
        ("CONFIG --vary prompts.test=a/b,a?b", "prompts.test"),
        ("CONFIG --seeds 0", "--seeds: expected a whole number of at least 1"),
        ("CONFIG --jobs 0", "--jobs: expected a whole number of at least 1"),
        ("CONFIG more.yaml", 'no config "more.yaml"'),
        ("CONFIG --job 2", 'unknown option "--job" (nearest: "--jobs")'),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    config_file, tmp_path: Path, capsys, words: str, text: str
) -> None:
    source, out = str(config_file("one")), tmp_path / "out"
    assert main(["sweep", *words.replace("CONFIG", source).split(), "--out", str(out)]) == 2
    told = capsys.readouterr()
    assert text in told.err and told.err.count("\n") == 1 and not told.out and not out.exists()


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(run_dir)
    assert newest is not None
    return checkpoint.load(newest)[0]["lora"]


@pytest.mark.long
def test_killed_at_any_point_it_goes_on_and_two_jobs_are_one_to_the_bit(config_file, tmp_path: Path) -> None:
    """Two trainings of processes of their own, twice: whole and one at a time; killed twice and two at a time."""
    source = str(config_file("tiny", epochs=4))

    def command(out: str, jobs: int) -> list[str]:
        words = ["--seeds", "2", "--jobs", str(jobs), "--out", out]
        return [sys.executable, "-m", "diffrl", "sweep", source, *words]

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = subprocess.run(command(str(whole), 1), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "2 of 2 runs are done" in done.stdout, done.stderr
    folders = sorted(path.relative_to(whole) for path in whole.glob("*/seed-*/"))
    assert len(folders) == 2
    for number in (signal.SIGKILL, signal.SIGTERM):
        sweep = subprocess.Popen(command(str(broken), 2), cwd=tmp_path, start_new_session=True)
        before = {path: path.stat().st_mtime_ns for path in broken.glob("*/*/metrics.jsonl")}
        while {path: path.stat().st_mtime_ns for path in broken.glob("*/*/metrics.jsonl")} == before:
            time.sleep(0.05)
        time.sleep(0.3)
        if number == signal.SIGKILL:
            os.killpg(sweep.pid, number)
        else:
            sweep.send_signal(number)
        assert sweep.wait() in (-signal.SIGKILL, 75)
    done = subprocess.run(command(str(broken), 2), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "2 of 2 runs are done" in done.stdout, done.stderr
    for folder in folders:
        ours, theirs = _weights(broken / folder), _weights(whole / folder)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        loras = [load_file(root / folder / "lora" / "pytorch_lora_weights.safetensors") for root in (broken, whole)]
        assert all(torch.equal(loras[0][name], loras[1][name]) for name in loras[1])
        assert [row["epoch"] for row in read_metrics(broken / folder)] == [0, 1, 2, 3, 4]
    events = [event["event"] for folder in folders for event in read_history(broken / folder)]
    assert "resumed" in events, "nothing was broken off: the kills came too late"
    told = [json.loads((root / "sweep.json").read_text()) for root in (whole, broken)]
    assert [run["state"] for run in told[1]["runs"]] == ["done"] * 2
    values = [[one["values"] for one in each["groups"]] for each in told]
    assert values[0] == values[1]
    stamps = {path: path.stat().st_mtime_ns for path in broken.glob("*/*/*")}
    again = subprocess.run(command(str(broken), 2), cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.startswith("2 of 2 runs are done already\n")
    assert stamps == {path: path.stat().st_mtime_ns for path in broken.glob("*/*/*")}, "a finished run is left alone"


def test_a_plugin_that_fails_is_told_and_the_summary_says_what_is_missing(
    config_file, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = str(config_file("one")), tmp_path / "out"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text('#!/bin/sh\necho "diffrl: error: rewards.redness: no file" >&2; exit 2\n')
    (tmp_path / "python").chmod(0o755)
    assert main(["sweep", source, "--seeds", "1", "--out", str(out)]) == 1
    told = capsys.readouterr().out.splitlines()
    log = out / "one" / "seed-0.log"
    assert told == [
        f"[1/1] one, seed 0: failed with exit code 2 (rewards.redness: no file); log: {log}",
        "0 of 1 runs are done, 1 are not",
    ]
    assert json.loads((out / "sweep.json").read_text())["runs"][0]["state"] == "failed"


def test_a_cluster_s_controller_that_starts_again_ends_no_sweep(tmp_path: Path, monkeypatch, caplog) -> None:
    """squeue answers before the jobs are sent, then twice not at all, then that they run, then that they have ended."""
    answers = iter(["", None, None, "7_0\n7_1\n", "7_1\n", None, ""])

    def squeue(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        if (answer := next(answers)) is None:
            raise subprocess.CalledProcessError(1, command, stderr="Unable to contact slurm controller\n")
        return subprocess.CompletedProcess(command, 0, answer)

    monkeypatch.setattr(cluster, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": squeue}))
    monkeypatch.setattr(cluster, "LOOK", 0.0)
    monkeypatch.setattr(cluster, "_submit", lambda jobs, *rest: ["7_0", "7_1"])
    monkeypatch.setattr(cluster, "_code", lambda folder, number: 0)
    done: list[str] = []
    listed = [job(tmp_path, name, "", done=lambda name=name: done.append(name)) for name in ("a", "b")]
    (tmp_path / "slurm").mkdir()
    assert cluster.run_on_slurm(listed, 2, {}, tmp_path) == [] and done == ["a", "b"] and not list(answers)
    assert caplog.text.count("Unable to contact") == 1


def test_a_cluster_that_does_not_answer_at_first_is_bad_input(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "squeue"
    program.write_text("#!/usr/bin/env bash\necho no controller >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="no controller"):
        cluster.run_on_slurm([job(tmp_path, "a", "")], 1, {}, tmp_path)


def test_a_sweep_begins_in_no_run_s_folder(config_file, tmp_path: Path) -> None:
    """Its runs would lie among that run's files, for which what reads it looks."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "metrics.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n')
    with pytest.raises(UserError, match="holds a run"):
        plan([str(config_file("one", epochs=1))], [], {}, 1, home)
