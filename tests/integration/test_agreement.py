"""Processes that were not started alike end at once, all of them, with one line that says what differs and where."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from children import child
from launching import free_port, train_joined

REDNESS = Path(__file__).parents[1] / "data" / "redness.py"


def started(*commands: list[str], folders: Sequence[Path] = ()) -> list[tuple[int | None, str]]:
    """Exit code and stderr of `diffrl train` with each process's own words, as a launcher starts two."""
    port, said = free_port(), [Path(tempfile.mkstemp()[1]) for _ in commands]
    running = [
        child(train_joined, rank, port, said[rank], words, folders[rank] if folders else Path.cwd())
        for rank, words in enumerate(commands)
    ]
    for one in running:
        one.join(200)
        one.kill()  # a deadlock is a failure
        one.join()
    return [(one.exitcode, path.read_text()) for one, path in zip(running, said, strict=True)]


def other_prompts(tmp_path: Path) -> str:
    path = tmp_path / "other.txt"
    path.write_text("red a\nred b\nred x\nred y\nred z\n")
    return f"prompts.train={path}"


def other_reward(tmp_path: Path) -> str:
    path = tmp_path / "redness.py"
    path.write_text(REDNESS.read_text() + "# changed\n")
    return f"rewards.redness.plugin={path}:Redness"


CASES: dict[str, Any] = {
    "seed": lambda _: "seed=7",
    "optimise.learning_rate": lambda _: "optimise.learning_rate=0.002",
    "epochs": lambda _: "epochs=2",
    "prompts.train": other_prompts,
    "rewards.redness": other_reward,
}


@pytest.mark.parametrize("key", CASES)
def test_processes_that_disagree_end_with_one_line(config_file: Any, tmp_path: Path, key: str) -> None:
    path = str(config_file("apart", epochs=1))
    (code, said), (other, silent) = started([path], [path, CASES[key](tmp_path)])
    assert (code, other) == (2, 2)
    lines = [line for line in said.splitlines() if line.startswith("diffrl: error:")]
    assert len(lines) == 1 and "rank 1 was started otherwise than rank 0" in lines[0] and key in lines[0]
    assert "diffrl: error:" not in silent and not (tmp_path / "apart" / "metrics.jsonl").exists()


@pytest.mark.parametrize("wrapped", [False, True])
def test_another_file_behind_the_same_path_is_seen_before_anything_is_loaded(
    config_file: Any, tmp_path: Path, wrapped: bool
) -> None:
    path, folders = str(config_file("apart", epochs=1)), [tmp_path / "machine0", tmp_path / "machine1"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        plugin = REDNESS.read_text().replace('name = "redness"', "embeds = True")  # as d2 asks of what it wraps
        (folder / "reward.py").write_text(f"{plugin}# {rank}\n")
    words = [path, f"rewards.redness.plugin={'d2:' * wrapped}reward.py:Redness"]
    (code, said), (other, _) = started(words, words, folders=folders)
    assert (code, other) == (2, 2) and "rewards.redness (file)" in said


def test_other_held_out_prompts_behind_the_same_path_are_seen(config_file: Any, tmp_path: Path) -> None:
    """Each process draws its share of them: the means would be of two mixed sets, or the processes would part."""
    folders = [tmp_path / "machine0", tmp_path / "machine1"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        (folder / "held.txt").write_text(f"red a\nred {rank}\n")
    words = [str(config_file("apart", epochs=1)), "prompts.test=held.txt"]
    (code, said), (other, _) = started(words, words, folders=folders)
    assert (code, other) == (2, 2) and "prompts.test (texts)" in said


def test_what_only_a_built_reward_tells_ends_all_processes_too(config_file: Any, tmp_path: Path) -> None:
    """Another model behind the same name, as a server or a folder of weights has it."""
    plugin = tmp_path / "reward.py"
    change = "\n\nimport os\n\nRedness.identity = os.environ['RANK']\n"
    plugin.write_text(REDNESS.read_text() + change)
    words = [str(config_file("apart", epochs=1)), f"rewards.redness.plugin={plugin}:Redness"]
    (code, said), (other, _) = started(words, words)
    assert (code, other) == (2, 2) and "rewards.redness (code and files)" in said
