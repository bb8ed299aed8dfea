"""A run's folder: nothing of it is lost, nothing is mixed up, and a resume goes on with the run that it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from children import in_child, signal_at
from test_resume import final_tensors

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.records import checkpoint
from diffrl.records.history import read_history
from diffrl.records.lock import FolderLock, LockLostError
from diffrl.records.tracking import read_metrics
from diffrl.run.start import find_start
from diffrl.run.train import train


@pytest.fixture
def finished(config_file) -> tuple[Path, Path]:
    """Config and folder of a run of one epoch."""
    path = config_file("run", epochs=1)
    train(load_config(path))
    return path, Path(load_config(path).run_dir)


def listing(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which bad input is refused."""
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("diffrl: error: ")
    return said[0]


@pytest.mark.parametrize("damage", ["deleted", "damaged"])
def test_a_resume_without_an_intact_checkpoint_changes_nothing(finished, capsys, damage: str) -> None:
    path, folder = finished
    if damage == "deleted":
        shutil.rmtree(folder / "checkpoints")
    else:
        for file in (folder / "checkpoints").rglob("lora.safetensors"):
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    before = listing(folder)
    said = refused(["train", "--resume", str(folder), "epochs=2"], capsys)
    assert "no intact checkpoint" in said and "start over on purpose" in said
    assert ("lora.safetensors" in said) == (damage == "damaged")
    assert listing(folder) == before
    assert "already holds a run" in refused(["train", str(path)], capsys)


def test_two_writers_of_one_folder(finished, capsys) -> None:
    """Whoever comes second is told who is there, for a new run and for a resume; a dead owner keeps nobody out."""
    path, folder = finished
    sleeper = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert sleeper.stdout is not None and sleeper.stdout.readline() == "held\n"
        before = listing(folder)
        for words in (["train", "--resume", str(folder), "epochs=2"], ["train", str(path)]):
            said = refused(words, capsys)
            assert f"process {sleeper.pid} on " in said and str(folder) in said
        said = refused(["train", "--resume", str(folder), "epochs=2", "--dry-run"], capsys)
        assert f"process {sleeper.pid} on " in said
        assert listing(folder) == before
    finally:
        sleeper.kill()
        sleeper.wait()
    assert (folder / ".lock").exists()
    assert main(["train", "--resume", str(folder), "epochs=2"]) == 0
    assert not list(folder.glob(".lock*"))


HOLDS = """
import sys, time
from pathlib import Path
from diffrl.records.lock import FolderLock
with FolderLock(Path(sys.argv[1]), beat=0.2):  # seen sooner
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_of_another_machine_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "run", beat=0.05, patience=0.5) as owner:
        lock = owner.path
        elsewhere = re.sub("host=.*", "host=node7", lock.read_text())
        with lock.open("r+") as file:  # the same file, which the owner renews
            file.write(elsewhere)
            file.truncate()
        with pytest.raises(UserError, match="on node7"), FolderLock(tmp_path / "run", beat=0.05, patience=0.5):
            pass
        assert lock.exists()
    # The owner dies: its heart stops, and after a while it keeps nobody out.
    (tmp_path / "run").mkdir(exist_ok=True)
    lock.write_text(elsewhere)
    with FolderLock(tmp_path / "run", beat=0.05, patience=0.5):
        assert "node7" not in lock.read_text()
    assert not lock.exists()


def test_an_owner_that_was_thought_dead_stops(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "run", beat=0.02) as owner:
        owner.check()
        other = owner.path.with_name("other")
        other.write_text(re.sub("pid=.*", "pid=1", re.sub("host=.*", "host=node7", owner.path.read_text())))
        os.replace(other, owner.path)
        for _ in range(200):
            if owner._lost:
                break
            time.sleep(0.02)
        with pytest.raises(LockLostError, match="taken by process 1 on node7"):
            owner.check()
    assert "node7" in owner.path.read_text()  # it is not ours to delete


def test_a_resume_cannot_end_before_its_checkpoint_and_tells_of_lost_epochs(finished, caplog) -> None:
    _, folder = finished
    config = load_config(folder / "config.yaml", ["epochs=5"])
    path = checkpoint.latest(folder)
    assert path is not None
    state = json.loads((path / "state.json").read_text())
    assert find_start(config, folder, resume=True).path == path
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(metrics[:-1]) + metrics[-1][:-40])
    find_start(config, folder, resume=True)
    assert "metrics.jsonl has no line of epoch 1: the curves have a gap there" in caplog.text
    later = config.model_copy(update={"epochs": state["epoch"] - 1})
    with pytest.raises(UserError, match=r"epochs: 0, but .*step-000002 has trained 1; a resume can only add epochs"):
        find_start(later, folder, resume=True)


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "config.yaml").read_text()
    assert old in text
    (folder / "config.yaml").write_text(text.replace(old, new))


def test_a_resume_compares_with_the_checkpoint_and_not_with_the_config_file(finished, capsys) -> None:
    _, folder = finished
    resume = ["train", "--resume", str(folder), "epochs=2"]
    original = (folder / "config.yaml").read_text()
    for old, new, said in (
        ("learning_rate: 0.001", "learning_rate: 0.01", "optimise.learning_rate: 0.01, but"),
        ("seed: 0", "seed: 1", "seed: 1, but"),
        ("objective: nft\nnft:", "objective: crd\ncrd:", 'objective: "crd", but'),
        ("weight: 1.0", "weight: 2.0", "rewards.redness.weight: 2.0, but"),
        ("rank: 4", "rank: 8", "lora.rank: 8, but"),
    ):
        edit(folder, old, new)
        before = listing(folder)
        told = refused(resume, capsys)
        assert said in told and "step-000002 was trained with" in told, told
        assert listing(folder) == before
        (folder / "config.yaml").write_text(original)
    assert "start a new run" in refused([*resume, "lora.rank=8", "--override", "lora.rank"], capsys)
    assert "nothing that a resume compares" in refused([*resume, "--override", "learning_rate"], capsys)


def test_what_a_name_stands_for_is_compared_too(config_file, tmp_path: Path, capsys) -> None:
    reward = tmp_path / "mine.py"
    text = (Path(__file__).parents[1] / "data" / "redness.py").read_text()
    reward.write_text(text)
    path = config_file("run", epochs=1, rewards={"redness": {"plugin": f"{reward}:Redness"}})
    train(load_config(path))
    resume = ["train", "--resume", str(tmp_path / "run"), "epochs=2"]
    reward.write_text(text.replace("** self.power", "** self.power / 2"))
    assert "rewards.redness: the code and files changed" in refused(resume, capsys)
    reward.write_text(text)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(prompts.read_text() + "red z\n")
    assert "prompts.train: the texts changed" in refused(resume, capsys)


@pytest.mark.long
def test_an_override_takes_effect_and_is_written_down(finished) -> None:
    _, folder = finished
    words = ["epochs=2", "optimise.learning_rate=1e-9", "evaluate.per_prompt=3"]
    assert main(["train", "--resume", str(folder), *words, "--override", "optimise.learning_rate"]) == 0
    events = [event for event in read_history(folder) if event["event"] == "resumed"]
    assert len(events) == 1 and events[0]["epoch"] == 1
    assert events[0]["overridden"] == {"optimise.learning_rate": [1e-3, 1e-9]}
    assert events[0]["changed"]["epochs"] == [1, 2] and events[0]["changed"]["evaluate.per_prompt"] == [2, 3]
    paths = sorted((folder / "checkpoints").iterdir())
    old, new = (checkpoint.load(path)[0]["lora"] for path in paths[-2:])
    moved = max(float((new[key] - old[key]).abs().max()) for key in old)
    assert 0 < moved < 1e-7  # two steps of 1e-9; at 1e-3 it would be 2e-3
    assert (checkpoint.identity_of(paths[-1]) or {})["optimise.learning_rate"] == 1e-9
    # The next resume knows what the run is now.
    assert main(["train", "--resume", str(folder), "epochs=3"]) == 0


def _die(path: Path, target: str, call: int) -> None:
    signal_at(target, call)
    train(load_config(path))


@pytest.mark.parametrize("again", ["train", "resume"])
def test_a_run_that_died_before_its_first_epoch_can_start(config_file, again: str) -> None:
    """Killed in the first epoch's sampling: line 0 is there, no checkpoint."""
    whole, broken = config_file("whole", epochs=1), config_file("broken", epochs=1)
    train(load_config(whole))
    assert in_child(_die, broken, "diffrl.run.loop:Loop._step", 1) == -signal.SIGKILL
    folder = Path(load_config(broken).run_dir)
    assert [line["epoch"] for line in read_metrics(folder)] == [0]
    assert main(["train", str(broken)] if again == "train" else ["train", "--resume", str(folder)]) == 0
    assert [line["epoch"] for line in read_metrics(folder)] == [0, 1]
    ours, expected = final_tensors(folder)["lora"], final_tensors(Path(load_config(whole).run_dir))["lora"]
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


def test_a_start_that_fails_leaves_no_folder(config_file, capsys) -> None:
    path = config_file("never", rollout={"resolution": 13})
    assert "rollout.resolution" in refused(["train", str(path)], capsys)
    assert not Path(load_config(path).run_dir).exists()


@pytest.mark.long
def test_the_code_of_a_watched_reward_is_compared_where_training_reads_it(config_file, tmp_path: Path, capsys) -> None:
    reward = tmp_path / "mine.py"
    text = (Path(__file__).parents[1] / "data" / "redness.py").read_text()
    reward.write_text(text)
    watch = {"mine": {"plugin": f"{reward}:Redness"}}
    for name, method in (("gated", {"gardo": {"auxiliary": ["mine"]}}), ("free", {})):
        reward.write_text(text)
        train(load_config(config_file(name, epochs=1, watch=watch, **method)))
        reward.write_text(text.replace("** self.power", "** self.power / 2"))
        resume = ["train", "--resume", str(tmp_path / name), "epochs=2"]
        if method:
            assert "watch.mine: the code and files changed" in refused(resume, capsys)
        else:
            assert main(resume) == 0, "what is only watched may change"
