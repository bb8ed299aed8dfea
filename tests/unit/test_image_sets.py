"""Image sets: their layouts, what is refused in one line, and latents that are encoded once."""

from __future__ import annotations

import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.image_sets.latents import Latents, fitted
from diffrl.image_sets.reading import is_here, read_set
from diffrl.policy import Policy

Row = dict[str, Any]


def paint(folder: Path, *names: str, size: tuple[int, int] = (8, 8)) -> None:
    """Pictures, each of a colour of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (40 * number, 255 - 30 * number, 90)).save(folder / name, format="png")


def write(folder: Path, *rows: Row, name: str = "images.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def parquet(folder: Path, columns: dict[str, list[Any]], rows: int = 1) -> str:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "part.parquet", row_group_size=rows)
    return str(folder)


def png(colour: int) -> bytes:
    stream = BytesIO()
    Image.new("RGB", (8, 8), (colour, 0, 0)).save(stream, format="png")
    return stream.getvalue()


def test_rows_of_one_prompt_are_one_group_and_a_group_s_row_is_one(tmp_path: Path) -> None:
    paint(tmp_path, *"abcde")
    one = [{"image": name, "prompt": "p", "scores": {"clip": i}} for i, name in enumerate("ab")]
    many = {"images": ["c", "d", "e"], "prompt": "q", "scores": {"clip": [1, None, 3]}, "metadata": {"words": "x"}}
    first, second = read_set(write(tmp_path, *one, many)).groups
    assert first.scores == {"clip": (0.0, 1.0)} and [Path(p.file).name for p in first.pictures] == ["a", "b"]
    assert second.scores["clip"][0] == 1 and np.isnan(second.scores["clip"][1]) and second.metadata == {"words": "x"}


def test_hpd_s_layouts(tmp_path: Path) -> None:
    paint(tmp_path, *"abcde")
    train = {"prompt": "p", "file_path": ["a", "b"], "human_preference": [0, 1]}
    test = {"prompt": "q", "image_path": ["c", "d", "e"], "rank": [2, 1, 3]}
    (tmp_path / "train.json").write_text(json.dumps([train, test]))
    first, second = read_set(str(tmp_path / "train.json")).groups
    assert first.scores == {"preference": (0.0, 1.0)} and second.scores == {"preference": (-2.0, -1.0, -3.0)}


def test_pick_a_pic_s_layout_without_rows_that_have_no_label(tmp_path: Path, policy: Policy) -> None:
    columns = {
        "caption": ["p", "q", "p"],
        "jpg_0": [png(10), png(20), png(30)],
        "jpg_1": [png(110), png(120), png(130)],
        "label_0": [1.0, 0.0, 0.5],
        "label_1": [0.0, 1.0, 0.5],
        "has_label": [True, False, True],
    }
    first, second = read_set(parquet(tmp_path, columns)).groups
    assert [g.scores["preference"] for g in (first, second)] == [(1.0, 0.0), (0.5, 0.5)]
    latents = Latents(policy, tmp_path / "cache")
    third = latents(second, torch.tensor([1]))
    assert torch.equal(third, policy.encode_images(fitted(np.array(Image.open(BytesIO(png(130)))), (16, 16))[None]))


GOOD: Row = {"image": "a", "prompt": "p", "scores": {"clip": 1.0}}
BAD: dict[str, tuple[list[Row], str]] = {
    "no picture there": ([GOOD, {**GOOD, "image": "x"}], 'images.jsonl:2: no picture "x" in'),
    "two prompts": ([GOOD, {**GOOD, "prompt": "q"}], 'is of "p" already, and here of "q"'),
    "length": ([{"images": ["a", "b"], "prompt": "p", "scores": {"clip": [1.0]}}], '1 scores "clip" of 2 pictures'),
    "no prompt": ([{"image": "a", "promt": "p"}], '(nearest: "promt")'),
    "no scores": ([{"image": "a", "prompt": "p"}], "images.jsonl:1: expected numbers by name"),
    "text": ([{**GOOD, "scores": {"clip": "high"}}], "scores.clip: expected numbers"),
    "not finite": ([{**GOOD, "scores": {"clip": float("inf")}}], "null where there is none"),
    "another's scores": ([GOOD, {"image": "b", "prompt": "p", "scores": {"ocr": 1}}], "has clip for the same prompt"),
    "what it is not": ([{"prompt": "p"}], "no picture"),
    "half of a letter": ([GOOD, {**GOOD, "prompt": "p\ud800"}], "images.jsonl:2: half of a surrogate pair"),
    "a number": ([{**GOOD, "image": 3}], "not a int"),
    "no latents": ([{"images": ["a"], "prompt": "p", "scores": {}, "latents": "x.npy"}], 'no file "x.npy" of latents'),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    paint(tmp_path, "a", "b")
    rows, text = BAD[case]
    with pytest.raises(UserError) as error:
        read_set(write(tmp_path, *rows))
    assert text in str(error.value) and "\n" not in str(error.value)


def test_bad_files_are_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    (tmp_path / "no.jsonl").write_text('{"image": \n')
    (tmp_path / "latin.jsonl").write_bytes('\n{"image": "é"}'.encode("cp1252"))
    (tmp_path / "empty").mkdir()
    for name, text in {
        "broken.parquet": "not a parquet file",
        "no.jsonl": "no.jsonl:1: not valid JSON",
        "latin.jsonl": "latin.jsonl:2: not UTF-8 text (byte 12 of the line)",
        "empty": "has no .jsonl and no .parquet",
        "brokn.parquet": 'nearest: "broken.parquet"',
    }.items():
        with pytest.raises(UserError) as error:
            read_set(str(tmp_path / name))
        assert text in str(error.value) and "\n" not in str(error.value)


def test_pictures_are_encoded_once_and_anew_when_they_change(tmp_path: Path, policy: Policy, monkeypatch: Any) -> None:
    paint(tmp_path, "a.png", "b.png", size=(24, 16))
    (group,) = read_set(
        write(tmp_path, {"images": ["a.png", "b.png"], "prompt": "p", "scores": {"clip": [0, 1]}})
    ).groups
    encoded: list[int] = []
    plain = policy.encode_images
    monkeypatch.setattr(policy, "encode_images", lambda x: encoded.append(len(x)) or plain(x))
    latents = Latents(policy, tmp_path / "cache")
    both = latents(group, torch.arange(2))
    assert torch.equal(Latents(policy, tmp_path / "cache")(group, torch.tensor([1])), both[1:]) and encoded == [2]
    assert both.shape == (2, *policy.latent_shape) and not latents.missing([group])
    os.utime(tmp_path / "a.png", ns=(1, 1))
    assert latents.missing([group]) == [group]


def test_given_latents_are_taken_as_they_are(tmp_path: Path, policy: Policy) -> None:
    paint(tmp_path, "a.png")
    stored = np.random.default_rng(0).normal(size=(1, *policy.latent_shape)).astype(np.float32)
    np.save(tmp_path / "l.npy", stored)
    row = {"images": ["a.png"], "prompt": "p", "scores": {}, "latents": "l.npy"}
    (group,) = read_set(write(tmp_path, row)).groups
    latents = Latents(policy, tmp_path / "cache")
    assert latents(group, torch.tensor([0])).numpy().tobytes() == stored.tobytes() and not latents.missing([group])
    np.save(tmp_path / "l.npy", stored[:, :1])
    with pytest.raises(UserError, match="latents of the shape"):
        latents(group, torch.tensor([0]))


def test_what_is_no_picture_is_named(tmp_path: Path, policy: Policy) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    (group,) = read_set(write(tmp_path, {**GOOD, "image": "a.png"})).groups
    with pytest.raises(UserError, match=r"images.jsonl:1: .*a.png is not a picture"):
        Latents(policy, tmp_path / "cache").encode([group])


def test_a_picture_is_scaled_to_cover_and_its_middle_is_taken() -> None:
    pixels = np.zeros((4, 12, 3), np.uint8)
    pixels[:, 4:8] = 255
    assert torch.equal(fitted(pixels, (4, 4)), torch.ones(3, 4, 4))
    assert fitted(pixels, (12, 4)).shape == (3, 4, 12) and fitted(pixels, (16, 16)).shape == (3, 16, 16)


# ---- on the hub


def test_a_set_of_the_hub_is_fetched_once_and_read_as_it_lies(tmp_path: Path, monkeypatch: Any) -> None:
    paint(tmp_path / "data", "1.png")
    write(tmp_path / "data", {"image": "1.png", "prompt": "a", "scores": {"s": 1}})
    asked: list[Any] = []

    def snapshot(name: str, **more: Any) -> str:
        asked.append((name, more))
        if more["local_files_only"]:
            raise FileNotFoundError("nothing here")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("diffrl.image_sets.hub.hub_failure", lambda: "")
    assert not is_here("hub:me/mine") and [g.prompt for g in read_set("hub:me/mine").groups] == ["a"]
    assert read_set("hub:me/mine:data/*.jsonl").groups[0].pictures[0].file == str(tmp_path / "data" / "1.png")
    assert asked[-1] == (
        "me/mine",
        {"repo_type": "dataset", "allow_patterns": "data/*.jsonl", "local_files_only": False},
    )
    for source, text in (
        ("hub:me/mine:none-*", "no such file"),
        ("hub:mine", "write hub:OWNER/NAME"),
        ("hub:a/b:c:d", "write hub"),
    ):
        with pytest.raises(UserError, match=text):
            read_set(source)


def test_without_a_network_a_set_of_the_hub_is_one_line(config_file: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"is not on this machine, and the hub does not give it \(HF_HUB_OFFLINE is set\)"
    ):
        read_set("hub:me/mine")
    sections = {"objective": "dpo", "optimise": {"batch_size": 16}}
    load_config(config_file("later", **sections, image_set={"source": "hub:me/mine", "cache": str(tmp_path)}))
    with pytest.raises(UserError, match=r"image_set\.cache: not given; name a folder"):
        load_config(config_file("nowhere", **sections, image_set={"source": "hub:me/mine"}))
    with pytest.raises(UserError, match=r"image_set\.source: .*write hub:OWNER/NAME"):
        load_config(config_file("odd", **sections, image_set={"source": "hub:mine", "cache": str(tmp_path)}))
