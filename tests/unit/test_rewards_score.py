"""Pictures that exist are scored, and the rows are read by image sets and divgen: one layout for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffrl.cli.main import main
from diffrl.divgen.folders import read_folder
from diffrl.image_sets.reading import read_set

REWARDS = """
def light(images):
    return images.mean((1, 2, 3))

def picky(images, prompts):
    return [None if "cat" in prompt else 1.0 for prompt in prompts]

class Best:
    name, groupwise = "best", True
    def __call__(self, images, prompts, metadata):
        means = images.mean((1, 2, 3))
        return (means == means.max()).float()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    folder = tmp_path / "pictures"
    folder.mkdir()
    rows = []
    for i in range(6):
        side = 8 if i < 4 else 12
        Image.fromarray(np.full((side, side, 3), 51 * i, np.uint8)).save(folder / f"{i}.png")
        rows.append({"file": f"{i}.png", "prompt": ["a cat", "two dogs", "a hut"][i // 2], "seed": 7 + i % 2})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_folder_is_scored_and_read_again(folder: Path, capsys: Any) -> None:
    file = folder.parent / "mine.py"
    assert main(["rewards", "score", str(folder), "--rewards", f"{file}:light,{file}:picky,{file}:Best"]) == 0
    said = capsys.readouterr().out
    assert "6 images, 3 prompts by manifest.jsonl" in said and "4 pictures of 2 prompts" in said
    rows = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    found = {row["file"]: row["scores"] for row in rows}
    for i in range(6):
        assert found[f"{i}.png"] == {
            "light": pytest.approx(i / 5, abs=1e-6),
            "picky": None if i < 2 else 1.0,
            "Best": i % 2,
        }
    # The same rows are an image set, and a folder of divgen.
    groups = read_set(str(folder / "rewards.jsonl")).groups
    assert {g.prompt: g.scores["Best"] for g in groups} == dict.fromkeys(("a cat", "two dogs", "a hut"), (0.0, 1.0))
    assert [len(g.pictures) for g in read_set(str(folder / "manifest.jsonl")).groups] == [2, 2, 2]
    assert [g.scores["Best"] for g in read_set(str(folder)).groups] == [(0.0, 1.0)] * 3, "audits read the folder"
    (folder / "manifest.jsonl").unlink()
    again = read_folder(folder)
    assert [(item.prompt.text, item.seed) for item in again.items][:2] == [("a cat", 7), ("a cat", 8)]


def test_a_set_of_groups_is_a_folder_too(folder: Path, capsys: Any) -> None:
    (folder / "manifest.jsonl").unlink()
    row = {"images": ["0.png", "1.png"], "prompt": "a cat", "scores": {"x": [1, 2]}, "metadata": {"kind": "pet"}}
    (folder / "images.jsonl").write_text(json.dumps(row) + "\n")
    out = folder.parent / "scored.jsonl"
    words = ["rewards", "score", str(folder), "--rewards", f"{folder.parent / 'mine.py'}:light", "--out", str(out)]
    assert main(words) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["file"], row["member"], row["kind"]) for row in rows] == [
        ("pictures/0.png", 0, "pet"),
        ("pictures/1.png", 1, "pet"),
    ]
    assert [group.scores["light"] for group in read_set(str(out)).groups] == [pytest.approx((0.0, 0.2))]


@pytest.mark.parametrize(
    ("reward", "said"),
    [("vlm", "no server is there"), ("nonsense", "--rewards: "), ("", "name at least one reward")],
)
def test_what_is_not_there_is_known_first(folder: Path, capsys: Any, reward: str, said: str) -> None:
    more = ["vlm.server=http://127.0.0.1:9/v1", "vlm.model=judge"] if reward == "vlm" else []
    assert main(["rewards", "score", str(folder), "--rewards", reward, *more]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error and not (folder / "rewards.jsonl").exists()
