"""A run on the hub: what is sent, that a failure stops nothing, and that it goes on where it was fetched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hub import Hub, serving
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file

from diffrl.additions.hub_prompts import parse as prompts_of_hub
from diffrl.cli.arguments import check_push
from diffrl.config import check_model, load_config
from diffrl.errors import UserError
from diffrl.hub import hub_file
from diffrl.image_sets.hub import parts as set_of_hub
from diffrl.lora_files import find_lora
from diffrl.pushing import hub
from diffrl.pushing.hub import Pusher, fetch
from diffrl.records import saving
from diffrl.sharing.publish import push as send_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two checkpoints, a LoRA, and what is nobody's business."""
    folder = tmp_path / "run"
    for step in (1, 2):
        saving.save(folder, step, {"lora": {"a": torch.full((2,), float(step))}}, {"epoch": step}, keep=2)
    for name in ("config.yaml", "metrics.jsonl", "lora/pytorch_lora_weights.safetensors", ".lock", "mine.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_the_newest_checkpoint_and_the_records_are_sent_privately(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From copies: what the run writes meanwhile changes nothing. A second push waits for no first one."""
    monkeypatch.setattr(hub, "get_token", lambda: None)
    sent, made, told, go = {}, [], [], Event()

    def upload(self: HfApi, *, repo_id: str, folder_path: Path, **rest: Any) -> None:
        go.wait(60)
        files = {path.relative_to(folder_path).as_posix(): path for path in folder_path.rglob("*") if path.is_file()}
        sent.update({name: path.read_bytes() for name, path in files.items()})

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **rest: made.append((name, rest)))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    pusher = Pusher(run, "me/run", told.append)
    assert "no token" in told.pop()
    pusher.push(2)
    (run / "metrics.jsonl").write_text("more")
    pusher.push(3)
    assert told == ["checkpoint.push: the push before is still under way; that of epoch 3 is left out"]
    go.set()
    pusher.wait()
    assert made == [("me/run", {"private": True, "exist_ok": True})] and len(told) == 1
    state = [f"checkpoints/step-000002/{name}" for name in ("lora.safetensors", "manifest.json", "state.json")]
    lora = "lora/pytorch_lora_weights.safetensors"
    assert sorted(sent) == [*state, "config.yaml", lora, "metrics.jsonl"]
    assert sent["metrics.jsonl"] == b"metrics.jsonl" and not (run / ".push").exists()


def test_a_push_that_fails_is_a_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*words: Any, **rest: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(HfApi, "create_repo", unreachable)
    monkeypatch.setattr(hub, "get_token", lambda: "hf_")
    told: list[str] = []
    pusher = Pusher(run, "me/run", told.append)
    pusher.push(2)
    pusher.wait()
    assert told == ["checkpoint.push: epoch 2 was not sent to me/run (OSError: no network)"]
    monkeypatch.setattr(hub, "stage", unreachable)
    pusher.push(3)
    assert told[1:] == ["checkpoint.push: epoch 3 was not sent: OSError: no network"]


def test_what_cannot_be_fetched_is_said_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_file: Any
) -> None:
    with pytest.raises(UserError, match='--resume: "hub:mine": write hub:OWNER/NAME'):
        fetch("hub:mine")
    with pytest.raises(UserError, match=f"{run} is not empty; go on there with --resume {run}, or name another folder"):
        fetch("hub:me/run", str(run))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="hub:me/run cannot be fetched"):
        fetch("hub:me/run", str(tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(UserError, match=r'checkpoint.push: "mine": write OWNER/NAME'):
        load_config(config_file("bad", checkpoint={"push": "mine"}))
    with pytest.raises(UserError, match=r'"https://huggingface.co/me/run": write OWNER/NAME, or an address'):
        load_config(config_file("bad", checkpoint={"push": "https://huggingface.co/me/run"}))


@pytest.mark.parametrize("name", ["ü/b", "a--b/c", "a/b..c", "-a/b", "a/b-", ".a/b", "a/b.git", f"a/{'b' * 97}"])
def test_no_door_takes_a_name_that_the_hub_refuses(name: str, config_file: Any, capsys: pytest.CaptureFixture) -> None:
    """Each asks one function, before anything is trained, measured or sent."""
    with pytest.raises(UserError, match=r"checkpoint\.push: .*write OWNER/NAME \(A to Z.*\), or an address"):
        load_config(config_file("bad", checkpoint={"push": name}))
    for read in (fetch, prompts_of_hub, set_of_hub):
        with pytest.raises(UserError, match=r"write hub:OWNER/NAME.* \(A to Z"):
            read(f"hub:{name}")
    for refuse in (check_push, lambda name: send_folder("nowhere", name)):
        with pytest.raises(UserError, match=r"^--push: .*write OWNER/NAME \(A to Z"):
            refuse(name)
    with pytest.raises(UserError, match="no folder"):
        check_model(name)
    with pytest.raises(UserError, match="no LoRA"):
        find_lora(name)


def command(server: Hub, home: Path, *words: str, verb: str = "train") -> subprocess.CompletedProcess[str]:
    words, env = (sys.executable, "-m", "diffrl", verb, *words), os.environ | server.environment(home)
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.long
def test_a_run_goes_on_from_the_hub_exactly(config_file: Any, tmp_path: Path) -> None:
    """Pushed after each epoch, fetched to another folder, and equal to the run that was never interrupted."""
    path, folder = str(config_file("run")), tmp_path / "elsewhere" / "again"
    push = ("checkpoint.push=me/run", "evaluate.every=1")
    with serving() as server:
        done = command(server, tmp_path, path, "epochs=2", *push)
        assert done.returncode == 0 and "checkpoint.push" not in done.stdout, done.stdout + done.stderr
        assert server.private == {"me/run": True}
        steps = {name.split("/")[1] for name in server.files["me/run"] if name.startswith("checkpoints/")}
        assert len(steps) == 1, "older checkpoints are removed"
        done = command(server, tmp_path, "--resume", "hub:me/run", "epochs=3", f"run_dir={folder}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert str(folder) in done.stdout
        server.broken = True
        done = command(server, tmp_path, path, f"run_dir={tmp_path / 'whole'}", *push)
        assert done.returncode == 0 and "was not sent to me/run" in done.stdout, done.stdout + done.stderr
    # The tensors, not the files: the order of a file's header changes from process to process.
    lora = "lora/pytorch_lora_weights.safetensors"
    again, whole = (load_file(one / lora) for one in (folder, tmp_path / "whole"))
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.long
def test_what_is_published_is_drawn_from_by_its_name_on_the_hub(config_file: Any, tmp_path: Path) -> None:
    path, run, drawn = str(config_file("run")), str(tmp_path / "run"), tmp_path / "drawn"
    with serving() as server:
        assert command(server, tmp_path, path, "epochs=1").returncode == 0
        done = command(server, tmp_path, run, "--push", "me/mine", verb="publish")
        assert done.returncode == 0 and done.stdout.endswith("/me/mine\n"), done.stdout + done.stderr
        folder = tmp_path / "run" / "publish"
        assert server.files["me/mine"] == {file.name: file.read_bytes() for file in folder.iterdir()}
        words = ("--lora", "me/mine", "--prompt", "red a", "--out", str(drawn))
        done = command(server, tmp_path, str(load_config(path).model), *words, verb="sample")
        assert done.returncode == 0 and "drawn as the LoRA was trained" in done.stderr + done.stdout, done.stderr
    assert (drawn / "grid.png").is_file()


def test_a_hub_that_breaks_off_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a connection that ends within an answer is no OSError."""

    class Disconnected(Exception): ...

    def breaks(*words: Any, **rest: Any) -> None:
        raise Disconnected("no response")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", breaks)
    monkeypatch.setattr("diffrl.hub.pinned", lambda name: (name, {}))
    monkeypatch.setattr("diffrl.hub_access.hub_failure", lambda: None)
    with pytest.raises(UserError, match=r'no LoRA "me/x", and the hub does not give it \(Disconnected: no response\)'):
        hub_file("me/x", "config.yaml", 'no LoRA "me/x"')
