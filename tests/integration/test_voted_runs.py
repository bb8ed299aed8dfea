"""Runs that people vote on: trained on what they say, resumed to the bit, on several processes, and without anybody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import train_on_two
from PIL import Image
from safetensors.torch import load_file

from diffrl.cli.main import main
from diffrl.methods import ballots
from diffrl_lab.replay import replay

VOTES: dict[str, Any] = {"rewards": {"votes": {"wait": 120.0, "groups": 3}}}


@contextmanager
def voter(run: Path) -> Iterator[list[int]]:
    """Somebody who likes bright pictures; gives the epochs that were voted on."""
    epochs: list[int] = []
    ended = threading.Event()

    def vote() -> None:
        while not ended.is_set():
            asked = ballots.open_epoch(run)
            for group in asked.groups if asked is not None else ():
                light = [np.asarray(Image.open(group.folder / name), np.float64).mean() for name in group.images]
                order = [[int(place)] for place in np.argsort(light)[::-1][:2]]
                try:
                    if ballots.add_vote(run, f"{group.epoch}-{group.identity}", "me", group.identity, order):
                        epochs.append(group.epoch)
                except (ballots.NotAsked, OSError):  # it is voted on, or the run has gone on
                    continue
            time.sleep(0.05)

    thread = threading.Thread(target=vote, daemon=True)
    thread.start()
    try:
        yield epochs
    finally:
        ended.set()
        thread.join(10)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def lora(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "lora").glob("*.safetensors")))


@pytest.mark.long
def test_votes_are_trained_on_and_a_resume_asks_nobody_twice(config_file: Callable[..., Path], tmp_path: Path) -> None:
    sections = {**VOTES, "checkpoint": {"every": 1, "keep": 3}, "tracking": {"groups": 2}}
    path = config_file("whole", epochs=2, **sections)
    with voter(tmp_path / "whole"):
        assert main(["train", str(path)]) == 0
    found = rows(tmp_path / "whole")
    assert [row["votes/answered"] for row in found[1:]] == [3, 3]
    assert found[1]["reward/votes/std"] > 0.5 and found[1]["votes/agreement/redness"] is not None
    assert not any(key.startswith("eval/votes") for row in found for key in row)
    kept = list((tmp_path / "whole" / "groups").iterdir())
    assert [folder.name for folder in kept] == ["epoch-0002"] and len(list(kept[0].glob("*.png"))) == 8
    votes = len(ballots.read_votes(tmp_path / "whole"))
    assert votes == 6
    files = sorted(file.stat().st_mtime_ns for file in (tmp_path / "whole").rglob("*"))
    replayed = replay(tmp_path / "whole", 2, 0).facts  # from the first epoch's checkpoint, with the votes of then
    assert replayed["compared"]["values"] > 5 and not replayed["compared"]["differ"]
    assert replayed["scores"]["votes"] is not None
    assert files == sorted(file.stat().st_mtime_ns for file in (tmp_path / "whole").rglob("*"))

    # The same run, whose second epoch was lost after its votes were given: nobody is asked again.
    for checkpoint in sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))[1:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    before = lora(tmp_path / "whole")
    started = time.monotonic()
    assert main(["train", "--resume", str(tmp_path / "whole")]) == 0
    assert time.monotonic() - started < 100
    after = lora(tmp_path / "whole")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert len(ballots.read_votes(tmp_path / "whole")) == votes


def test_without_a_vote_the_run_goes_on_without_this_reward(
    config_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file("alone", epochs=1, rewards={"votes": {"wait": 0.2}}, tracking={"groups": 0})
    plain = config_file("plain", epochs=1, tracking={"groups": 0})
    assert main(["train", str(path)]) == 0 and main(["train", str(plain)]) == 0
    assert "no vote came within 0.2 s; trained without this reward" in capsys.readouterr().out
    row = rows(tmp_path / "alone")[1]
    assert row["reward/votes"] is None and row["votes/answered"] == 0 and row["reward/redness"] is not None
    with_votes, without = lora(tmp_path / "alone"), lora(tmp_path / "plain")
    assert all(torch.equal(with_votes[key], without[key]) for key in without)  # NaN, and not 0


@pytest.mark.long
def test_one_process_asks_and_the_others_get_the_answer(config_file: Callable[..., Path], tmp_path: Path) -> None:
    """Three groups on two processes: the one in the middle is drawn by both."""
    sections: dict[str, Any] = {**VOTES, "rollout": {"groups": 3}, "optimise": {"batch_size": 12, "micro_batch": None}}
    found = {}
    for processes in (1, 2):
        run = tmp_path / f"on{processes}"
        path = config_file(run.name, epochs=2, **sections)
        with voter(run) as epochs:
            if processes == 1:
                assert main(["train", str(path)]) == 0
            else:
                train_on_two(path)
        assert sorted(epochs) == [1, 1, 1, 2, 2, 2]
        found[processes] = rows(run), lora(run)
    for one, two in zip(found[1][0][1:], found[2][0][1:], strict=True):
        assert one["votes/votes"] == two["votes/votes"] == 3
        assert one["reward/votes/std"] == pytest.approx(two["reward/votes/std"], abs=1e-5)
    assert all(torch.allclose(found[1][1][key], found[2][1][key], atol=2e-4) for key in found[1][1])
