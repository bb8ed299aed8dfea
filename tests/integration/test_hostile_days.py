"""A run among hanging rewards and dry runs: what it says, what it leaves, and how soon it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from children import in_child

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.records import checkpoint
from diffrl.run.interrupt import EXIT_CODE

HANGS = """
import os, signal, time

class Hangs:
    name = "hangs"
    calls = 0

    def __call__(self, images, prompts, metadata):
        Hangs.calls += 1
        if Hangs.calls > 5:  # line 0 has one call, each epoch two, and an evaluation one
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3600)  # longer than the time limit, which would end the run in another way
        return images.mean((1, 2, 3))
"""
DELETES = """
import pathlib, shutil

class Deletes:
    name = "deletes"
    calls = 0

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, images, prompts, metadata):
        Deletes.calls += 1
        if Deletes.calls == 4:  # after two on random images and an evaluation: in the first epoch
            shutil.rmtree(self.folder)
        return images.mean((1, 2, 3))
"""
FLAT = """
class Flat:
    name = "flat"

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3)) * 0 + 0.25
"""


def _train(path: Path) -> None:
    sys.exit(main(["train", str(path)]))


def test_sigterm_ends_a_run_whose_reward_hangs(config_file, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    path = config_file("run", rewards={"redness": {"plugin": f"{tmp_path / 'hangs.py'}:Hangs"}}, epochs=4)
    assert in_child(_train, path) == EXIT_CODE
    kept = checkpoint.latest(Path(load_config(path).run_dir))
    assert kept is not None and checkpoint.load(kept)[1]["epoch"] >= 1


def test_a_run_whose_folder_is_deleted_says_so_and_makes_no_half_of_it_again(config_file, tmp_path, capsys) -> None:
    (tmp_path / "deletes.py").write_text(DELETES)
    folder = tmp_path / "run"
    rewards = {"redness": {"plugin": f"{tmp_path / 'deletes.py'}:Deletes", "folder": str(folder)}}
    path = config_file("run", rewards=rewards, epochs=1)
    assert main(["train", str(path)]) == 1
    said = capsys.readouterr().err
    assert f"{folder}/samples/epoch-0001: could not be written: its folder {folder}/samples is gone" in said
    assert said.rstrip().endswith("; nothing is left") and said.count("\n") == 1
    assert not folder.exists()


def test_a_dry_run_checks_what_a_run_checks_and_writes_nothing(config_file, tmp_path: Path, capsys) -> None:
    (tmp_path / "flat.py").write_text(FLAT)
    redness = str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"
    rewards = {"redness": {"plugin": redness, "cache": str(tmp_path / "cache")}}
    rewards["flat"] = {"plugin": f"{tmp_path / 'flat.py'}:Flat"}
    path = config_file("run", rewards=rewards, epochs=1)
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "redness: 0." in said and 'over 4 images of "red' in said
    assert "WARNING: flat: 0.25 +- 0 over 4 images" in said and "no spread" in said
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["train", str(path)]) == 0
    assert 'WARNING: reward "flat" gave all images the same score, 0.25, in epoch 1' in capsys.readouterr().out
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(path), "--dry-run"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run"), "seed=5", "--dry-run"]) == 2
    assert "seed: 5, but" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", [["run_dir=file/run"], ["rewards.redness.cache=file/cache"]])
def test_a_dry_run_finds_a_folder_that_cannot_be_made(config_file, tmp_path: Path, monkeypatch, capsys, words) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["train", str(config_file("run")), "--dry-run", *words]) == 2
    assert '"' in (said := capsys.readouterr().err) and "is a file; name a folder" in said
