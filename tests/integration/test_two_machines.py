"""Two machines of one process each: what only one of them meets ends both, and both say which machine it was."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from children import child, replace, signal_at
from hub_cache import COMMITS, put
from launching import free_port, train_joined
from safetensors.torch import load_file

pytestmark = pytest.mark.long
LORA = "pytorch_lora_weights.safetensors"
REDNESS = Path(__file__).parents[1] / "data" / "redness.py"


def machine(
    rank: int, port: int, said: Path, words: list[str], folder: Path, more: Mapping[str, str], act: Any
) -> None:
    """In a child: `diffrl train WORDS` as the one process of machine `rank`, in a working folder of its own."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", **more}
    socket.gethostname = lambda: folder.name
    if (folder / "hub").is_dir():
        from huggingface_hub import constants

        constants.HF_HUB_CACHE = str(folder / "hub")
    if act is not None:
        act()
    train_joined(rank, port, said, words, folder, local=0)


@pytest.fixture
def cluster(config_file: Any, tiny_model: Path, tmp_path: Path) -> Callable[..., list[tuple[int | None, str]]]:
    """Runs both machines, the second one with `words`, environment `more` and `act`; exit codes and what was said."""

    def run(words: list[str] | None = None, act: Any = None, alone: bool = False, **more: str) -> Any:
        folders = [tmp_path / "machine0", tmp_path / "machine1"]
        for folder in folders:
            folder.mkdir()
            (folder / "prompts.txt").write_text("red a\nred b\nred c\nred d\n")
            (folder / "reward.py").write_text(REDNESS.read_text())
        path = str(config_file("two", epochs=1))
        given = [path, "rewards.redness.plugin=reward.py:Redness", "prompts.train=prompts.txt"]
        if act == "no plugin":
            (folders[1] / "reward.py").unlink()
        elif act == "no prompts":
            (folders[1] / "prompts.txt").unlink()
        elif act == "no revision":
            words = [*given, "model=acme/tiny@v9"]
        elif act == "other snapshot":
            given.append("model=acme/tiny")
            for folder, commit in zip(folders, COMMITS, strict=True):
                (folder / "hub").mkdir()
                put(folder / "hub", "acme/tiny", tiny_model, commit)
        port, said = free_port(), [tmp_path / f"said{rank}" for rank in range(2)]
        both = [(0, given, {"DIFFRL_JOINING": "5"} if alone else {}, None), (1, words or given, more, act)]
        running = [
            child(machine, rank, port, said[rank], its, folders[rank], env, do if callable(do) else None)
            for rank, its, env, do in both[: 1 if alone else 2]
        ]
        begun = time.monotonic()
        for one in running:
            one.join(max(1.0, 100 - (time.monotonic() - begun)))
            one.kill()  # one that waits for ever is a failure
            one.join()
        assert not (tmp_path / "two" / "metrics.jsonl").exists()
        return [(one.exitcode, path.read_text()) for one, path in zip(running, said, strict=False)]

    return run


def killed() -> None:
    signal_at("diffrl.prepare:prepare", 1)


def killed_before() -> None:
    def join(hello: Any) -> None:
        until = time.monotonic() + 30
        while not hello._links and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    replace({"diffrl.ranks.meeting:join": join})


def terminated() -> None:
    signal_at("diffrl.prepare:prepare", 1, signal.SIGTERM)


def no_package() -> None:
    def join(*given: object) -> None:
        raise ImportError("no accelerate")

    replace({"diffrl.ranks.meeting:join": join})


def other_version() -> None:
    from diffrl.ranks import meeting

    meeting.__version__ = "0.0.1"


def full_disk() -> None:
    def fail(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device", "/cache")

    import diffrl.prepare

    diffrl.prepare.make_config = fail  # type: ignore[assignment]


NO_STORE = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
ONE_ALONE: dict[str, tuple[dict[str, Any], int, str]] = {
    "no plugin": ({"act": "no plugin"}, 2, "reward.py"),
    "no prompts": ({"act": "no prompts"}, 2, "prompts.txt"),
    "no config": ({"words": ["nowhere.yaml"]}, 2, "nowhere.yaml"),
    "an unknown key": ({"words": ["playground/nft", "optimise.learnig_rate=1"]}, 2, "learnig_rate"),
    "no run to resume": ({"words": ["--resume", "nowhere"]}, 2, "nowhere"),
    "no such revision": ({"act": "no revision"}, 2, 'no revision "v9"'),
    "a store that does not answer": (
        {"words": ["playground/nft", "prompts.train=s3://there/prompts.txt"], **NO_STORE},
        2,
        "s3://there/prompts.txt",
    ),
    "a full disk": ({"act": full_disk}, 1, "No space left"),
    "killed": ({"act": killed}, -signal.SIGKILL, ""),
    "killed before all have met": ({"act": killed_before}, -signal.SIGKILL, "is gone"),
    "a missing package": ({"act": no_package}, 1, "no accelerate"),
}


@pytest.mark.parametrize("event", ONE_ALONE)
def test_what_one_machine_meets_ends_both_with_its_name(cluster: Any, event: str) -> None:
    given, code, text = ONE_ALONE[event]
    (first, said), (second, its) = cluster(**given)
    assert second == code and first == (2 if code == 2 else 1)
    assert code < 0 or (text in its and ("diffrl: error:" in its or "Traceback" in its))
    (line,) = [line for line in said.splitlines() if line.startswith("diffrl: error:")]
    assert "rank 1 (process " in line and "on machine1" in line and text in line


def test_a_signal_at_one_machine_while_it_starts_is_said_by_its_name(cluster: Any) -> None:
    for (code, said), text in zip(cluster(act=terminated), ("SIGTERM to rank 1 (", "SIGTERM; "), strict=True):
        assert code == 75 and f"nothing was trained yet  (ended by {text}" in said


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"act": other_version}, "0.0.1"),
        ({"act": "other snapshot"}, f'model (commit of acme/tiny) ("{COMMITS[0]}" and "{COMMITS[1]}")'),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "the launcher's engine"),
    ],
)
def test_other_versions_and_launchers_are_refused_on_both(cluster: Any, given: dict[str, Any], text: str) -> None:
    for code, said in cluster(**given):
        (line,) = [line for line in said.splitlines() if line.startswith("diffrl: error:")]
        assert code == 2 and "rank 1 was started otherwise than rank 0" in line and text in line


def test_a_machine_that_does_not_come_is_waited_for_within_bounds(cluster: Any) -> None:
    ((code, said),) = cluster(alone=True)
    assert code == 2 and "rank 0 of 2 has not met all others at 127.0.0.1:" in said
    assert "within 5 s; no sign of rank 1" in said


def test_a_run_s_folder_on_one_machine_s_disk_is_handed_on(config_file: Any, tmp_path: Path) -> None:
    folders = [tmp_path / "machine0", tmp_path / "machine1"]
    for folder in folders:
        folder.mkdir()
    path = str(config_file("two", evaluate={"every": 2, "prompts": 2, "per_prompt": 2}))

    def both(*words: str) -> None:
        port, said = free_port(), [tmp_path / f"said{rank}" for rank in range(2)]
        running = [child(machine, rank, port, said[rank], [path, *words], folders[rank], {}, None) for rank in range(2)]
        for one in running:
            one.join(100)
            one.kill()
            one.join()
        assert [one.exitcode for one in running] == [0, 0], [file.read_text() for file in said]

    both("run_dir=whole", "epochs=2")
    both("run_dir=run", "epochs=1")
    assert not (folders[1] / "run").exists()
    both("run_dir=run", "epochs=2", "--resume", "auto")
    whole, parts = (load_file(folders[0] / name / "lora" / LORA) for name in ("whole", "run"))
    assert all(torch.equal(whole[name], tensor) for name, tensor in parts.items())
    assert len((folders[0] / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert (folders[1] / "run" / "config.yaml").is_file() and not (folders[1] / "run" / "lora").exists()
