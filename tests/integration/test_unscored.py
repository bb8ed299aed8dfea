"""Images without a score: a judge that refuses some ends no run, and is counted; a resume passes the same images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from launching import train_on_two

from diffrl.config import load_config
from diffrl.prompts import Prompt
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.report import read_run, warnings_of
from diffrl.rewards import RewardError, Unscored
from diffrl.rewards.scoring import Scorer
from diffrl.rewards.unscored import Tally
from diffrl.run.train import train

# Refuses by the pixels: about one image in three, the same ones in every run.
JUDGE = """
from diffrl.rewards import Unscored


class Judge:
    name = "judge"
    batch_size = {size}

    def __call__(self, images, prompts, metadata):
        light = images.mean((1, 2, 3))
        refused = (light * 200).round().int() % 3 == 0
        if len(images) == 1 and bool(refused):
            raise Unscored("I cannot help with that")
        return [None if no else float(one) for one, no in zip(light, refused)]
"""


def unlike(one: dict, two: dict) -> list[str]:
    """The tensors of two checkpoints that are not equal to the bit, with their largest distance."""
    pairs = [(f"{part}/{key}", one[part][key], two[part][key]) for part in one for key in one[part]]
    return [f"{name}: {(a.double() - b.double()).abs().max()}" for name, a, b in pairs if not torch.equal(a, b)]


def run_with_a_judge(config_file, folder: Path, name: str, size: int = 4, **sections) -> Path:
    (folder / f"judge{size}.py").write_text(JUDGE.format(size=size))
    entry = {"plugin": f"{folder}/judge{size}.py:Judge", "unscored": 0.9}
    path: Path = config_file(name, **sections)
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "rewards": {"judge": entry}}))
    return path


@pytest.mark.long
def test_a_run_with_refusals_ends_and_resumes_to_the_bit(config_file, tmp_path: Path) -> None:
    whole, broken, alone = (
        run_with_a_judge(config_file, tmp_path, name, size, objective="nft", checkpoint={"every": 1, "keep": 9})
        for name, size in (("whole", 4), ("broken", 4), ("alone", 1))
    )
    for path in (whole, broken, alone):
        train(load_config(path))
    folder = Path(load_config(whole).run_dir)
    lines = read_metrics(folder)
    missing = sum(line.get("unscored/judge", 0) for line in lines)
    assert 0 < missing < 48 and all(0.0 < line["reward/judge"] < 1.0 for line in lines if "reward/judge" in line)
    assert any(f"judge had no score for {missing} images" in text for text in warnings_of(read_run(folder)))
    # None in a list and `Unscored` are the same.
    other = read_metrics(Path(load_config(alone).run_dir))
    assert [line.get("unscored/judge") for line in other] == [line.get("unscored/judge") for line in lines]
    # From the first epoch on, again: the same images are passed.
    config = load_config(broken)
    for step in sorted((Path(config.run_dir) / "checkpoints").iterdir())[1:]:
        step.rename(tmp_path / step.name)
    train(config, resume=Path(config.run_dir))
    one, two = (checkpoint.load(checkpoint.latest(Path(load_config(path).run_dir)))[0] for path in (whole, broken))  # type: ignore[arg-type]
    assert unlike(one, two) == []


@pytest.mark.long
def test_two_per_cent_of_refusals_end_no_run_at_the_default_bound(config_file, tmp_path: Path) -> None:
    """Some 2 % of the images have no score, and `unscored` is what it is when nobody sets it."""
    (tmp_path / "judge.py").write_text(JUDGE.format(size=4).replace("* 200).round().int() % 3", "* 5000).int() % 50"))
    entry, counts = {"plugin": f"{tmp_path}/judge.py:Judge"}, {"groups": 4, "group_size": 20, "batch_size": 40}
    paths, size = [], {"batch_size": 80}
    for name in ("whole", "broken"):
        paths.append(config_file(name, epochs=3, checkpoint={"every": 1, "keep": 9}, rollout=counts, optimise=size))
        config = yaml.safe_load(paths[-1].read_text())
        paths[-1].write_text(yaml.safe_dump({**config, "rewards": {"judge": entry}}))
        train(load_config(paths[-1]))
    whole, broken = (Path(load_config(path).run_dir) for path in paths)
    missing = sum(line.get("unscored/judge", 0) for line in read_metrics(whole))
    assert 2 <= missing <= 9, "of 240 images"
    assert any(f"judge had no score for {missing} images" in text for text in warnings_of(read_run(whole)))
    for step in sorted((broken / "checkpoints").iterdir())[1:]:
        step.rename(tmp_path / step.name)
    train(load_config(paths[1]), resume=broken)
    one, two = (checkpoint.load(checkpoint.latest(run))[0] for run in (whole, broken))  # type: ignore[arg-type]
    assert unlike(one, two) == []


@pytest.mark.long
def test_two_processes_count_together(config_file, tmp_path: Path) -> None:
    path = run_with_a_judge(config_file, tmp_path, "pair", epochs=1)
    train_on_two(path)
    train(load_config(run_with_a_judge(config_file, tmp_path, "single", epochs=1)))
    pair, single = (read_metrics(tmp_path / name)[-1].get("unscored/judge") for name in ("pair", "single"))
    assert pair == single and pair


@pytest.mark.parametrize(
    ("none", "asked", "bound", "stops"),
    [(1, 1, 0.02, False), (1, 40, 0.02, False), (2, 64, 0.02, False), (6, 64, 0.02, True), (16, 16, 0.02, True),
     (1, 64, 0.0, True), (16, 16, 1.0, False), (0, 16, 0.0, False)],
)  # fmt: skip
def test_the_bound(none: int, asked: int, bound: float, stops: bool) -> None:
    tally = Tally(["a"], {"a": bound})
    tally.count("a", torch.tensor([torch.nan] * none + [1.0] * (asked - none)), "refused")
    if not stops:
        assert tally.take(lambda rows: rows) == ({"unscored/a": none} if none else {})
        return
    with pytest.raises(RewardError, match=rf"no score for {none} of {asked} images \(the first: refused\)"):
        tally.take(lambda rows: rows)


def test_a_batch_with_one_refusal_is_asked_for_image_by_image() -> None:
    class Picky:
        name = "picky"

        def __call__(self, images, prompts, metadata):
            if "refuse" in prompts:
                raise Unscored("no")
            return torch.ones(len(images))

    scorer = Scorer({"picky": Picky()})
    scores = scorer.score(torch.rand(3, 3, 8, 8), [Prompt(text, {}) for text in ("a", "refuse", "b")])
    assert scores[:, 0].isnan().tolist() == [False, True, False]
