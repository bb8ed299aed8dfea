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
from tiny import count_forwards

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.image_sets import draw as draw_module
from diffrl.image_sets.draw import draw_set
from diffrl.image_sets.latents import Latents, fitted
from diffrl.image_sets.reading import read_set
from diffrl.policy import Policy
from diffrl.records.tracking import save_image
from diffrl.run.fit import PICTURE, estimate
from diffrl.run.train import Run

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
    (tmp_path / "empty").mkdir()
    for name, text in {
        "broken.parquet": "not a parquet file",
        "no.jsonl": "no.jsonl:1: not valid JSON",
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
    with pytest.raises(UserError, match=r"images.jsonl:1: .*a.png is no picture"):
        Latents(policy, tmp_path / "cache").encode([group])


def test_a_picture_is_scaled_to_cover_and_its_middle_is_taken() -> None:
    pixels = np.zeros((4, 12, 3), np.uint8)
    pixels[:, 4:8] = 255
    assert torch.equal(fitted(pixels, (4, 4)), torch.ones(3, 4, 4))
    assert fitted(pixels, (12, 4)).shape == (3, 4, 12) and fitted(pixels, (16, 16)).shape == (3, 16, 16)


# ---- a run on a set


def set_of(run: Run, folder: Path, indices: list[int] | None = None) -> str:
    """A rollout's own images, latents and scores."""
    rollout, scores, _ = run.loop._rollout(0)
    size, rows = run.config.rollout.group_size, []
    images = run.policy.decode(rollout.latents)
    for place, prompt in enumerate(rollout.prompts):
        part = slice(place * size, (place + 1) * size)
        names = [f"{place}-{i}.png" for i in range(size)]
        folder.mkdir(exist_ok=True)
        for name, image in zip(names, images[part], strict=True):
            save_image(image, folder / name, {})
        np.save(folder / f"{place}.npy", rollout.latents[part].numpy())
        table = {name: scores[part, k].tolist() for k, name in enumerate(run.scorer.names)}
        rows.append({"images": names, "prompt": prompt.text, "scores": table, "latents": f"{place}.npy"})
    return write(folder, *rows)


def make(config_file: Any, objective: str, source: str | None = None, *words: str, **sections: Any) -> Run:
    more = {} if source is None else {"image_set": {"source": source}}
    sections = {"objective": objective, "optimise": {"batch_size": 16, "accumulation": 1}, **more, **sections}
    name = f"{objective}-{'online' if source is None else 'set'}"
    return Run(load_config(config_file(name, **sections), words))


@pytest.mark.parametrize("objective", ["dpo", "gdro", "rwr", "sft", "nft"])
def test_a_rollout_s_own_images_give_the_online_step_to_the_bit(
    config_file: Any, tmp_path: Path, monkeypatch: Any, objective: str
) -> None:
    """With its latents, its scores and its order nothing is left that an objective could see."""
    online = make(config_file, objective)
    source = set_of(online, tmp_path / "set")
    offline = make(config_file, objective, source)
    assert offline.groups is not None
    monkeypatch.setattr(offline.groups.stream, "batch", lambda epoch: list(range(4)))
    seen = count_forwards(offline, monkeypatch)
    mine, theirs = offline.loop.run_epoch(0), online.loop.run_epoch(0)
    assert mine["loss"] == theirs["loss"] and mine["reward/redness"] == theirs["reward/redness"]
    assert mine["rollout/forwards"] == 0 and mine["diversity"] is None and theirs["rollout/forwards"] == 48
    assert not any(name == "old" and not grad for name, grad in seen if objective != "nft")
    one, other = online.policy.state("default"), offline.policy.state("default")
    assert all(torch.equal(one[key], other[key]) for key in one) and any(value.any() for value in one.values())


def test_without_latents_the_step_is_that_of_the_encoded_pictures(config_file: Any, tmp_path: Path) -> None:
    online = make(config_file, "dpo")
    source = set_of(online, tmp_path / "set")
    lines = [json.loads(line) for line in (tmp_path / "set" / "images.jsonl").read_text().splitlines()]
    write(tmp_path / "set", *({key: value for key, value in line.items() if key != "latents"} for line in lines))
    offline = make(config_file, "dpo", source)
    assert offline.offline is not None and offline.groups is not None
    offline.offline.prepare(range(1), offline.accelerator, lambda: None, lambda text: None)
    rollout, scores, features = offline.loop.source(0)
    first = offline.groups.stream.batch(0)[0]
    pictures = torch.stack([to_tensor(tmp_path / "set" / f"{first}-{i}.png") for i in range(4)])
    assert torch.equal(rollout.latents[:4], offline.policy.encode_images(pictures))
    assert scores[:4, 0].tolist() == pytest.approx(lines[first]["scores"]["redness"]) and features.isnan().all()
    assert len(list((tmp_path / "set" / ".latents").rglob("*.npy"))) == 4


def to_tensor(file: Path) -> torch.Tensor:
    pixels = np.array(Image.open(file).convert("RGB"))
    return fitted(pixels, (pixels.shape[1], pixels.shape[0]))


def test_a_larger_group_gives_other_members_each_epoch_and_a_smaller_one_is_left_out(
    config_file: Any, tmp_path: Path, caplog: Any
) -> None:
    source = set_of(make(config_file, "dpo"), tmp_path / "set")
    paint(tmp_path / "set", "x.png")
    lines = (tmp_path / "set" / "images.jsonl").read_text()
    small = {"images": ["x.png"], "prompt": "alone", "scores": {"redness": [1.0]}}
    (tmp_path / "set" / "images.jsonl").write_text(lines + json.dumps(small) + "\n")
    pairs = make(config_file, "dpo", source, rollout={"group_size": 2}, optimise={"batch_size": 8, "accumulation": 1})
    assert "1 prompts have fewer than 2 pictures" in caplog.text and pairs.groups is not None
    drawn = {tuple(pairs.groups.members(epoch, 0).tolist()) for epoch in range(20)}
    assert len(drawn) > 3 and all(a < b < 4 for a, b in drawn)
    rollout, scores, _ = pairs.loop.source(3)
    assert len(rollout.latents) == 8 == len(scores) and rollout.member.tolist() == [0, 1] * 4


def test_mixed_rows_are_the_rollout_s_and_the_set_s_on_any_number_of_processes(
    config_file: Any, tmp_path: Path
) -> None:
    source = set_of(make(config_file, "nft"), tmp_path / "set")
    run = make(config_file, "nft", source, image_set={"source": source, "share": 0.5})
    whole, scores, features = run.loop.source(1)
    drawn, own, _ = run.loop._rollout(1)
    given = [i for i in range(16) if bool(features[i].isnan().all())]
    assert given == [4, 5, 6, 7, 12, 13, 14, 15] and whole.total == 16 and whole.forwards == drawn.forwards == 24
    rest = [i for i in range(16) if i not in given]
    assert torch.equal(whole.latents[rest], drawn.latents) and torch.equal(scores[rest], own)
    assert [whole.prompts[0], whole.prompts[2]] == drawn.prompts
    assert torch.equal(whole.cond.embeds[[0, 2]], drawn.cond.embeds)
    assert torch.equal(whole.cond.embeds[1], run.policy.encode([whole.prompts[1].text]).embeds[0])
    parts = []
    for rank in range(2):
        run.loop.processes.rank, run.loop.processes.count = rank, 2
        parts.append(run.loop.source(1))
    assert [part[0].first for part in parts] == [0, 8]
    torch.testing.assert_close(torch.cat([part[0].latents for part in parts]), whole.latents)
    assert torch.equal(torch.cat([part[1] for part in parts])[given], scores[given])
    assert torch.cat([part[0].prompt_index for part in parts]).tolist() == whole.prompt_index.tolist()
    run.loop.processes.rank, run.loop.processes.count = 0, 1
    metrics = run.loop.run_epoch(1)
    assert metrics["diversity"] > 0 and metrics["rollout/forwards"] == 24


def test_a_resumed_run_goes_on_as_if_it_had_not_been_broken_off(config_file: Any, tmp_path: Path) -> None:
    source = set_of(make(config_file, "gdro"), tmp_path / "set")

    def states(run: Run) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in run.policy.state("default").items()}

    one, other = make(config_file, "gdro", source), make(config_file, "gdro", source)
    other.folder.path.mkdir(parents=True, exist_ok=True)
    one.loop.run_epoch(0)
    one.epoch = 1
    one.save()
    one.loop.run_epoch(1)
    other.restore()
    assert other.epoch == 1
    other.loop.run_epoch(1)
    assert all(torch.equal(value, states(other)[key]) for key, value in states(one).items())


PROBLEMS: dict[str, tuple[str, str]] = {
    "image_set={share: 0.5}": ("", "image_set.source: not given"),
    "image_set.share=0.3": ("", "image_set.share: 0.3 is 1.2 of the 4 prompts"),
    "image_set.columns.redness=blue": ("", 'image_set.columns.redness: no scores "blue" in'),
    "image_set.columns.green=redness": ("", 'image_set.columns.green: no such reward (nearest: "redness")'),
    "rollout.group_size=5": ("optimise.batch_size=20", "rollout.groups: 4 prompts an epoch from"),
    "objective=grpo": ("rollout.sampler=flow_sde", 'objective: "grpo" trains on its own samples'),
    "prompts.overlap=false": ("", "prompts.test: 2 of its prompts are in image_set"),
    "image_set.shares=1": ("", "image_set.shares"),
    "gardo.gate=all": ("gardo.diversity=off", "gardo: reads images and rewards of a rollout"),
}


@pytest.mark.parametrize("word", PROBLEMS)
def test_what_cannot_work_is_said_before_a_model_is_loaded(config_file: Any, tmp_path: Path, word: str) -> None:
    paint(tmp_path / "set", *(f"{i}.png" for i in range(16)))
    prompts = ["red a", "red b", "x", "y"]
    rows = [
        {"images": [f"{4 * g + i}.png" for i in range(4)], "prompt": prompt, "scores": {"redness": [0, 1, 2, 3]}}
        for g, prompt in enumerate(prompts)
    ]
    source = write(tmp_path / "set", *rows)
    path = config_file("bad", objective="dpo", optimise={"batch_size": 16}, image_set={"source": source})
    load_config(path)
    more, text = PROBLEMS[word]
    with pytest.raises(UserError) as error:
        load_config(path, [word, *([more] if more else [])])
    assert text in str(error.value) and "\n" not in str(error.value)


def test_a_set_that_is_not_there_is_missed_when_the_run_begins_and_not_before(
    config_file: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A recipe is valid, and its memory is counted, before its set has been drawn."""
    config = load_config(config_file("later", objective="dpo", image_set={"source": str(tmp_path / "sets")}))
    monkeypatch.setattr(Run, "_load", lambda *_, **__: pytest.fail("the model is loaded"))
    with pytest.raises(UserError, match=r"image_set\.source: no file or folder"):
        Run(config)
    work = estimate(config).work
    assert work.keys() == {"training"} and PICTURE in estimate(config).peaks


def test_mixed_rows_need_as_many_of_each_kind_on_every_process(config_file: Any, tmp_path: Path) -> None:
    source = set_of(make(config_file, "nft"), tmp_path / "set")
    path = config_file("two", image_set={"source": source, "share": 0.25})
    load_config(path)
    with pytest.raises(UserError, match=r"image_set\.share: 2 processes do not divide the 1 prompts"):
        load_config(path, world=2)


# ---- drawing one


def draw(model: str, out: Path, prompts: Path, **more: Any) -> int:
    redness = f"{Path(__file__).parents[1] / 'data' / 'redness.py'}:Redness"
    return draw_set(
        rewards={redness: {}}, out=out, **{"model": model, "prompts": str(prompts), "per_prompt": 2, "steps": 2, **more}
    )


def test_a_set_is_drawn_once_and_goes_on_where_it_was_broken_off(
    model: str, policy: Policy, tmp_path: Path, monkeypatch: Any
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"red {i}", "words": i}) + "\n" for i in range(3)))
    assert draw(model, tmp_path / "whole", prompts) == 6 and draw(model, tmp_path / "whole", prompts) == 0
    groups = read_set(str(tmp_path / "whole")).groups
    assert [group.prompt for group in groups] == ["red 0", "red 1", "red 2"] and groups[2].metadata == {"words": 2}
    latents = Latents(policy, tmp_path / "whole" / ".latents")
    assert not latents.missing(groups)  # what was drawn is what is trained on
    picture = policy.decode(latents(groups[1], torch.tensor([1])))
    assert float((picture[0] - to_tensor(Path(groups[1].pictures[1].file))).abs().max()) <= 0.5 / 255 + 1e-6

    plain, written = draw_module._write, []

    def dies(out: Path, rank: int, place: int, *rest: Any) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(place)
        plain(out, rank, place, *rest)

    monkeypatch.setattr(draw_module, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        draw(model, tmp_path / "broken", prompts, batch_size=2)
    monkeypatch.setattr(draw_module, "_write", plain)
    with pytest.raises(UserError, match=r"no \.jsonl"):
        read_set(str(tmp_path / "broken"))
    with (tmp_path / "broken" / "parts" / "0000.jsonl").open("a") as stream:
        stream.write('\n{"place": 1, "ima')  # cut off by a kill
    with pytest.raises(UserError, match="another seed"):
        draw(model, tmp_path / "broken", prompts, seed=1)
    assert draw(model, tmp_path / "broken", prompts, batch_size=2) == 4
    one, other = ((tmp_path / name / "images.jsonl").read_text() for name in ("whole", "broken"))
    first, second = (json.loads(text.splitlines()[2])["scores"]["Redness"] for text in (one, other))
    assert first == pytest.approx(second, abs=1e-6) and len(first) == 2
    assert not (tmp_path / "broken" / "parts").exists()
