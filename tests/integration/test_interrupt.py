"""Pre-empted by a signal, a run saves, exits with its own code, and a resume continues as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from children import in_child, signal_at
from test_resume import final_tensors

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import TrainingError
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.run.interrupt import EXIT_CODE, Interrupted, Interrupts
from diffrl.run.train import train

# Where the signal arrives: (class, attribute, number of the call).
MOMENTS = {
    "starting": ("diffrl.rewards.building:build_rewards", 1),
    "sampling": ("diffrl.policy.base:Policy.decode", 5),
    "optimising": ("diffrl.run.loop:Loop._step", 3),
    "evaluating": ("diffrl.run.evaluation:Evaluation.scores", 2),
}
EVERY = {"every": 3}  # epochs between checkpoints, more than the run has until the signal


def train_disturbed(path: Path, moment: str, number: int) -> int:
    """`diffrl train` in a child that gets a signal; its exit code."""
    return in_child(_train_disturbed, path, moment, number)


def _train_disturbed(path: Path, moment: str, number: int) -> None:
    signal_at(*MOMENTS[moment], number)
    sys.exit(main(["train", str(path)]))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_signal_in_the_start_leaves_nothing_behind(config_file, name: str) -> None:
    path = config_file("early")
    assert train_disturbed(path, "starting", signal.Signals[name]) == EXIT_CODE
    folder = Path(load_config(path).run_dir)
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(one, marks=[] if one == "optimising" else [pytest.mark.long])
        for one in MOMENTS
        if one != "starting"
    ],
)
def test_a_signal_loses_nothing(config_file, moment: str) -> None:
    """Checkpoints are three epochs apart, the signal comes in the second: its first one is kept all the same."""
    whole, broken = (config_file(name, checkpoint=EVERY) for name in ("whole", "broken"))
    train(load_config(whole))
    number = {"optimising": signal.SIGINT, "evaluating": signal.SIGUSR1}.get(moment, signal.SIGTERM)
    assert train_disturbed(broken, moment, number) == EXIT_CODE
    folder = Path(load_config(broken).run_dir)
    assert (folder / "exit_code").read_text() == "75\n"
    kept = checkpoint.latest(folder)
    assert kept is not None and checkpoint.load(kept)[1]["epoch"] >= 1
    assert main(["train", str(broken), "--resume", "auto"]) == 0
    assert (folder / "exit_code").read_text() == "0\n"
    expected, ours = final_tensors(Path(load_config(whole).run_dir)), final_tensors(folder)
    for part, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(ours[part][name], tensor), f"{part}/{name} differs after the interruption"
    assert [m["epoch"] for m in read_metrics(folder)] == [0, 1, 2, 3]


def test_resume_auto_starts_a_run_where_there_is_none(config_file, capsys) -> None:
    path = config_file("fresh", epochs=1)
    assert main(["train", str(path), "--resume", "auto"]) == 0
    assert main(["train", "--resume", "auto"]) == 2
    assert "give CONFIG" in capsys.readouterr().err


def test_the_first_signal_is_noted_and_the_second_ctrl_c_stops() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="ended by SIGINT"):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            sys.stderr.flush()  # the handler runs at the next bytecode
    assert signal.getsignal(signal.SIGINT) is before


POOLED = """
import multiprocessing, os, signal, sys, time
from diffrl.run.interrupt import Interrupts

with Interrupts() as interrupts:
    with multiprocessing.get_context("fork").Pool(2) as pool:  # its end is SIGTERM to its processes, and to wait
        for worker in pool._pool:
            for number in (signal.SIGINT, signal.SIGUSR1):  # as a terminal and a cluster send them, to all
                os.kill(worker.pid, number)
        assert pool.map(abs, [-1, -2, -3, -4]) == [1, 2, 3, 4]
    interrupts.check()
"""


def test_a_pool_of_processes_in_a_reward_ends() -> None:
    """Its processes took SIGTERM for the run's, and noted it: the pool waited for them for ever."""
    command = [sys.executable, "-c", POOLED]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_run_of_non_finite_gradients_leaves_its_epoch_to_look_at(config_file, monkeypatch) -> None:
    """The checkpoint is the epoch's beginning, so a resume runs into the same step; a file says what is known."""
    from diffrl.methods.nft.objective import NFT

    loss, calls = NFT.loss, []

    def breaks(self, phi, rows):
        calls.append(0)
        return loss(self, phi, rows) * (float("nan") if len(calls) > 4 else 1.0)  # from the second epoch on

    monkeypatch.setattr(NFT, "loss", breaks)
    config = load_config(config_file("bad", checkpoint=EVERY))
    monkeypatch.setattr("diffrl.run.loop.MAX_SKIPPED", 0)
    with pytest.raises(TrainingError, match="not finite"):
        train(config)
    folder = Path(config.run_dir)
    kept = checkpoint.latest(folder)
    assert kept is not None and checkpoint.load(kept)[1]["epoch"] == 1
    found = json.loads((folder / "nonfinite.json").read_text())
    assert found["epoch"] == 2 and found["step"] == 2 and found["loss"] == "nan"
    assert set(found["prompts"]) <= set(Path(config.prompts.train).read_text().splitlines())


def test_an_exit_in_an_objective_is_a_failure(config_file, monkeypatch, capsys) -> None:
    """`sys.exit()` in one ended the run with code 0 and without a word."""
    from diffrl.methods.nft.objective import NFT

    monkeypatch.setattr(NFT, "loss", lambda *_: sys.exit(0))
    path = config_file("leaves")
    assert main(["train", str(path)]) == 1
    said = capsys.readouterr().err
    assert re.search(r"error: an exit in the middle of the run: SystemExit: 0 \(test_interrupt.py:\d+\); there", said)
    assert (Path(load_config(path).run_dir) / "exit_code").read_text().strip() == "1"
