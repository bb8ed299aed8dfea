"""Runs on an image set: the online step to the bit, mixed rows, resumes, processes; and a set that is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broken import broken_after
from children import on_two
from launching import joined
from PIL import Image
from tiny import count_forwards

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.image_sets.draw import draw_set
from diffrl.image_sets.latents import Latents, fitted
from diffrl.image_sets.reading import read_set
from diffrl.memory.fit import PICTURE, estimate
from diffrl.policy import Policy
from diffrl.records.tracking import save_image
from diffrl.rollout import collect
from diffrl.run import setup
from diffrl.run.train import Run
from tests.unit.test_image_sets import paint, write

# ---- a run on a set


def set_of(run: Run, folder: Path, indices: list[int] | None = None) -> str:
    """A rollout's own images, latents and scores."""
    rollout, scores, _ = run.rollouts(0)
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
    sections = {"objective": objective, "optimise": {"batch_size": 16, "micro_batch": None}, **more, **sections}
    name = f"{objective}-{'online' if source is None else 'set'}"
    return Run(load_config(config_file(name, **sections), words))


@pytest.mark.parametrize("objective", ["dpo", "gdro", "rwr", "sft", "nft"])
def test_a_rollout_s_own_images_give_the_online_step_to_the_bit(
    config_file: Any, tmp_path: Path, monkeypatch: Any, objective: str
) -> None:
    """With its latents, its scores and its order nothing is left that an objective could see."""
    best: dict[str, Any] = {"rwr": {"weights": "best"}} if objective == "sft" else {}
    online = make(config_file, "rwr" if best else objective, **best)
    source = set_of(online, tmp_path / "set")
    offline = make(config_file, "rwr" if best else objective, source, **best)
    monkeypatch.setattr(offline.source.groups.stream, "batch", lambda epoch: list(range(4)))
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
    offline.begin()
    rollout, scores, features = offline.loop.source(0)
    first = offline.source.groups.stream.batch(0)[0]
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
    pairs = make(config_file, "dpo", source, rollout={"group_size": 2}, optimise={"batch_size": 8, "micro_batch": None})
    assert "1 prompts have fewer than 2 pictures" in caplog.text
    drawn = {tuple(pairs.source.groups.members(epoch, 0).tolist()) for epoch in range(20)}
    assert len(drawn) > 3 and all(a < b < 4 for a, b in drawn)
    rollout, scores, _ = pairs.loop.source(3)
    assert len(rollout.latents) == 8 == len(scores) and rollout.member.tolist() == [0, 1] * 4


def test_mixed_rows_are_the_rollout_s_and_the_set_s_on_any_number_of_processes(
    config_file: Any, tmp_path: Path
) -> None:
    source = set_of(make(config_file, "nft"), tmp_path / "set")
    run = make(config_file, "nft", source, image_set={"source": source, "share": 0.5})
    whole, scores, features = run.loop.source(1)
    drawn, own, _ = run.rollouts(1)
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


RIVALS: dict[str, Any] = {
    "rollout": {"group_size": 2},
    "optimise": {"batch_size": 4, "micro_batch": None},
    "dpo": {"ring": 3, "follow": 1, "flip": True},
}


def test_a_rival_is_drawn_by_the_reference_for_the_set_s_best(config_file: Any, tmp_path: Path) -> None:
    """SePPO: pairs of the best picture of a prompt and of an image that one of the earlier states draws, both ways."""
    source = set_of(make(config_file, "dpo"), tmp_path / "set")
    text = (tmp_path / "set" / "images.jsonl").read_text()
    (tmp_path / "set" / "images.jsonl").write_text(text + text.splitlines()[0] + "\n")  # a prompt that comes again
    run = make(config_file, "dpo", source, **RIVALS, image_set={"source": source, "rival": True})
    assert len(run.source.groups.groups) == 4
    run.loop.run_epoch(0)  # two steps: the states differ from the untrained one
    rollout, scores, features = run.loop.source(1)
    assert run.objective.samples_from in ("past0", "past1", "past2")
    assert rollout.total == 8 and rollout.member.tolist() == [0, 1] * 4 and rollout.forwards == 4 * run.spec.steps
    assert features[::2].isnan().all() and not features[1::2].isnan().any()
    best = [max(run.source.groups.groups[i].scores["redness"]) for i in run.source.groups.stream.batch(1)]
    assert scores[::2, 0].tolist() == pytest.approx(best)
    prompts, members = rollout.prompts, torch.ones(4, 1, dtype=torch.long)
    again = collect(
        run.policy, prompts, run.spec, seed=run.config.seed, epoch="1, rivals", group_size=1, batch_size=8,
        snapshot=run.objective.samples_from, keep_images=False, members=members,
    )  # fmt: skip
    torch.testing.assert_close(again.latents, rollout.latents[1::2])
    line = run.loop.run_epoch(1)
    assert line["loss"] is not None and 0 <= line["dpo/flipped"] <= 1 and line["reward/redness"] is not None
    assert line["diversity"] is None or line["diversity"] != line["diversity"]


def test_a_run_with_earlier_states_goes_on_exactly(config_file: Any, tmp_path: Path) -> None:
    source = set_of(make(config_file, "dpo"), tmp_path / "set")
    sections = {**RIVALS, "image_set": {"source": source, "rival": True}}
    one, other = make(config_file, "dpo", source, **sections), make(config_file, "dpo", source, **sections)
    other.folder.path.mkdir(parents=True, exist_ok=True)
    one.loop.run_epoch(0)
    one.epoch = 1
    one.save()
    losses = [one.loop.run_epoch(epoch)["loss"] for epoch in (1, 2)]
    other.restore()
    assert [other.loop.run_epoch(epoch)["loss"] for epoch in (1, 2)] == losses
    for name in ("default", "past0", "past1", "past2"):
        mine, its = one.policy.state(name), other.policy.state(name)
        assert all(torch.equal(mine[key], its[key]) for key in mine)


PROBLEMS: dict[str, tuple[str, str]] = {
    "image_set={share: 0.5}": ("", "image_set.source: not given"),
    "image_set.share=0.3": ("", "image_set.share: 0.3 is 1.2 of the 4 prompts"),
    "image_set.columns.redness=blue": ("", "image_set.columns: unknown key: it is gone: name the reward as the set's"),
    "rollout.group_size=5": ("optimise.batch_size=20", "rollout.groups: 4 prompts an epoch from"),
    "objective=grpo": ("rollout.sampler=flow_sde", 'objective: "grpo" trains on its own samples'),
    "prompts.overlap=false": ("", "prompts.test: 2 of its prompts are in image_set"),
    "image_set.shares=1": ("", "image_set.shares"),
    "image_set.rival=true": ("", "rollout.group_size: 4, but a pair of image_set.rival is 2"),
    "image_set={rival: true, source: x}": (
        "objective=nft",
        "image_set.rival: makes pairs, which are what dpo trains on",
    ),
    "dpo.ring=3": ("", "dpo.ring: its states are taken every dpo.follow optimiser steps"),
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
    monkeypatch.setattr(setup, "load_policy", lambda *_, **__: pytest.fail("the model is loaded"))
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


def test_a_set_is_drawn_once_and_goes_on_where_it_was_broken_off(model: str, policy: Policy, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"red {i}", "words": i}) + "\n" for i in range(3)))
    assert draw(model, tmp_path / "whole", prompts) == 6 and draw(model, tmp_path / "whole", prompts) == 0
    groups = read_set(str(tmp_path / "whole")).groups
    assert [group.prompt for group in groups] == ["red 0", "red 1", "red 2"] and groups[2].metadata == {"words": 2}
    latents = Latents(policy, tmp_path / "whole" / ".latents")
    assert not latents.missing(groups)  # what was drawn is what is trained on
    picture = policy.decode(latents(groups[1], torch.tensor([1])))
    assert float((picture[0] - to_tensor(Path(groups[1].pictures[1].file))).abs().max()) <= 0.5 / 255 + 1e-6

    with broken_after(1):
        draw(model, tmp_path / "broken", prompts, batch_size=2)
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


def _process(rank: int, paths: list[Path], folder: Path) -> None:
    """One of two processes."""
    with joined(rank, folder):
        _train(paths, folder, world=2)


def _train(paths: list[Path], folder: Path, world: int) -> None:
    for path in paths:
        run = Run(load_config(path, world=world))
        run.begin()
        lines = [run.loop.run_epoch(epoch) for epoch in range(2)]
        if run.main:
            torch.save((run.policy.state("default"), lines[-1]["loss"]), folder / f"{path.stem}{world}.pt")


@pytest.mark.long
def test_one_process_equals_two(config_file: Any, tmp_path: Path) -> None:
    """Groups that are split over processes, pictures that each process encodes its share of, and mixed rows."""
    source = set_of(make(config_file, "nft"), tmp_path / "set")
    rows = [json.loads(line) for line in (tmp_path / "set" / "images.jsonl").read_text().splitlines()]
    write(tmp_path / "set", *({key: value for key, value in row.items() if key != "latents"} for row in rows))
    optimise = {"batch_size": 12, "micro_batch": None, "learning_rate": 1e-3}
    odd = {"rollout": {"groups": 3}, "optimise": optimise, "image_set": {"source": source}}
    mixed = {"optimise": {**optimise, "batch_size": 16}, "image_set": {"source": source, "share": 0.5}}
    rivals = {**RIVALS, "image_set": {"source": source, "rival": True}}
    inverted = {"optimise": {**optimise, "batch_size": 16, "noise": "path"}, "image_set": mixed["image_set"]}
    paths = [
        config_file("alone", objective="dpo", **odd),
        config_file("mixed", objective="gdro", **mixed),
        config_file("rivals", objective="dpo", **rivals),
        config_file("inverted", objective="gdro", **inverted),
    ]
    on_two(_process, paths, tmp_path)
    _train(paths, tmp_path, world=1)
    for name in ("alone", "mixed", "rivals", "inverted"):
        (one, loss), (two, other) = (torch.load(tmp_path / f"{name}{world}.pt") for world in (1, 2))
        difference = sum(float((one[key] - two[key]).square().sum()) for key in one)
        assert (difference / sum(float(value.square().sum()) for value in one.values())) ** 0.5 < 1e-4, name
        assert loss == pytest.approx(other, rel=2e-3, abs=1e-6)
