"""Two processes, of which one is stopped, killed, told to end or fails: both end, and one line says which it was."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import child, replace
from launching import free_port, train_joined

from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics

pytestmark = pytest.mark.long
SECONDS = 6  # seconds without a heartbeat
GRACE = 4.0  # seconds for a main thread to end by itself: one that waits in an exchange never does
# As long as the file "busy" is there, rank 1's scores are not.
SLOW = """
import os, pathlib, time
{redness}
score = Redness.__call__

def slow(self, *given, **more):
    busy = pathlib.Path(__file__).with_name("busy")
    while os.environ["RANK"] == "1" and busy.exists():
        if busy.read_text() == "fail":
            raise RuntimeError("no paint")
        time.sleep(0.1)
    return score(self, *given, **more)

Redness.__call__ = slow
"""
REDNESS = Path(__file__).parents[1] / "data" / "redness.py"


def one_of_two(rank: int, port: int, said: Path, words: list[str], folder: Path, heard: bool) -> None:
    """In a child."""
    replace({"diffrl.ranks.heartbeat:GRACE": GRACE})
    train_joined(rank, port, said, words, folder, heard, str(SECONDS))


class Two:
    """Two processes of `diffrl train`, joined as a launcher's are."""

    def __init__(self, path: Path, folder: Path, heard: bool) -> None:
        self.run, self.busy = folder / path.stem, folder / "busy"
        redness = REDNESS.read_text()
        (folder / "slow.py").write_text(SLOW.format(redness=redness))
        self.said = [folder / f"said{rank}.txt" for rank in range(2)]
        port, words = free_port(), [str(path), f"rewards.redness.plugin={folder / 'slow.py'}:Redness"]
        self.all = [child(one_of_two, rank, port, self.said[rank], words, folder, heard) for rank in range(2)]

    def wait_for(self, what: Callable[[], object], seconds: float = 400) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until and all(one.exitcode is None for one in self.all), self.text()
            time.sleep(0.05)

    def train(self, epochs: int = 2) -> None:
        """Until that many epochs are trained."""
        self.wait_for(lambda: (self.run / "metrics.jsonl").is_file() and len(read_metrics(self.run)) > epochs)

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pid(rank), number)

    def pid(self, rank: int) -> int:
        return self.all[rank].pid or 0

    def code(self, rank: int, seconds: float = 120) -> int | None:
        self.all[rank].join(seconds)
        return self.all[rank].exitcode

    def codes(self) -> list[int | None]:
        return [self.code(0), self.code(1)]

    def text(self) -> str:
        return "".join(path.read_text() for path in self.said)

    def lines(self) -> list[str]:
        """What was said, without the note of a signal."""
        return [line for line in self.text().splitlines() if line.strip() and "ending after this" not in line]


@pytest.fixture
def two(config_file: Any, tmp_path: Path) -> Iterator[Callable[..., Two]]:
    started: list[Two] = []

    def start(heard: bool = True, **sections: Any) -> Two:
        sections = {"epochs": 5000, "checkpoint": {"every": 1000}, "evaluate": {"every": 1000}, **sections}
        started.append(Two(config_file("peers", **sections), tmp_path, heard))
        return started[-1]

    yield start
    for one in (one for run in started for one in run.all):
        one.kill()
        one.join()


def check_kept(run: Two) -> None:
    """The epoch that was broken off begins with a checkpoint, though checkpoints are far apart."""
    kept = checkpoint.latest(run.run)
    assert kept is not None and checkpoint.load(kept)[1]["epoch"] >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_ends_the_others(two: Callable[..., Two], rank: int) -> None:
    run = two()
    run.train()
    run.send(signal.SIGSTOP, rank)
    assert run.code(1 - rank) == 1
    (line,) = run.lines()
    assert f"rank {rank} (process {run.pid(rank)} on {socket.gethostname()}) has given no sign of life" in line
    assert f"--resume {run.run}" in line or rank == 0
    if rank == 1:
        check_kept(run)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_others(two: Callable[..., Two], rank: int) -> None:
    run = two()
    run.train()
    run.send(signal.SIGKILL, rank)
    assert run.code(1 - rank) == 1
    (line,) = run.lines()
    assert f"rank {rank} (process {run.pid(rank)} on {socket.gethostname()}) is gone" in line
    if rank == 1:
        check_kept(run)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_to_a_process_that_waits_in_an_exchange_ends_both(two: Callable[..., Two], name: str) -> None:
    run = two()
    run.train()
    run.busy.write_text("")
    time.sleep(2)  # rank 0 is in the exchange after the rollout
    run.send(signal.Signals[name], 0)
    assert run.codes() == [75, 75]
    (line,) = run.lines()
    assert f"--resume {run.run}" in line and name in line
    check_kept(run)


def test_a_signal_to_all_ends_all(two: Callable[..., Two]) -> None:
    run = two()
    run.train()
    run.send(signal.SIGHUP, 0, 1)
    assert run.codes() == [75, 75]
    assert len(run.lines()) == 1
    check_kept(run)


def test_a_failure_of_one_is_said_once(two: Callable[..., Two]) -> None:
    run = two()
    run.train()
    run.busy.write_text("fail")
    assert run.codes() == [1, 1]
    (line,) = run.lines()
    assert "no paint" in line
    check_kept(run)


def test_who_is_slow_is_not_dead(two: Callable[..., Two]) -> None:
    """A reward that takes twice the limit; a machine that sleeps (all are stopped); nobody reads the output."""
    run = two(heard=False, epochs=20)
    run.train(0)  # the reward has been tried before this
    run.busy.write_text("")
    time.sleep(2 * SECONDS)
    run.busy.unlink()
    run.send(signal.SIGSTOP, 0, 1)
    time.sleep(2 * SECONDS)
    run.send(signal.SIGCONT, 0, 1)
    assert run.codes() == [0, 0], run.text()
    assert all("the output was closed" in line for line in run.lines()), run.text()
    assert [line["epoch"] for line in read_metrics(run.run)] == list(range(21))
