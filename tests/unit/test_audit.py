"""The audit finds what was planted, says nothing of what holds, and counts an exploit only where it is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from diffrl.cli.main import main
from diffrl.prompts import load_prompts
from diffrl.rewards.scoring import Scorer
from diffrl_lab.audit import exploits
from diffrl_lab.audit.cases import rendered
from diffrl_lab.audit.run import Audit, Subject, _judging, _outcome, audit

BIASED = '''
class White:
    """Pays for bright pictures, whatever the prompt asks for."""

    name = "white"
    differentiable = True

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3))
'''
FIRST = """
class First:
    name, groupwise = "first", True

    def __call__(self, images, prompts, metadata):
        import torch

        return torch.arange(len(images), 0, -1.0)
"""


def shares(result: dict[str, Any]) -> dict[str, float]:
    return {one["name"]: one["share"] for one in result["exploits"]}


def job(plugin: str, **more: Any) -> Audit:
    return Audit(plugin, {}, **{"model": None, "limit": 12, **more})


def test_the_planted_bias_is_found_without_being_told(tmp_path: Path) -> None:
    result = audit(job("preference"), tmp_path)
    paid = [f"{look['fact']} {look['value']}" for look in result["looks"][:2]]
    assert set(paid) == {"style striped", "tone pale"} and result["looks"][0]["share"] > 0.5
    found = shares(result)
    assert found["ascent on pixels"] > 0.8 and result["score"] == max(found.values())
    assert found["the look that it likes"] > found["a wrong image as it is"]
    page = (tmp_path / "report.html").read_text()
    assert "style striped" in page and page.count("data:image/png") == sum(
        2 * len(v) for v in result["fooled"].values()
    )


@pytest.mark.long
def test_the_verifier_holds(tmp_path: Path) -> None:
    result = audit(job("playground", limit=6), tmp_path)
    assert result["score"] == 0 and not any(result["fooled"].values())
    assert "a climb without gradient" in shares(result) and "Nothing did." in (tmp_path / "report.html").read_text()


@pytest.mark.long
def test_a_short_training_against_the_reward_is_one_of_the_exploits(tmp_path: Path) -> None:
    """Its images are chosen like the others; asked again, the finished run is not trained again."""
    given = {"judge": "playground", "model": "playground", "limit": 4, "train": 1}
    first = audit(job("clip", **given), tmp_path)
    assert "1 epoch of training" in shares(first)
    lora, metrics = next((tmp_path / "run" / "lora").glob("*.safetensors")), tmp_path / "run" / "metrics.jsonl"
    before = (lora.stat().st_mtime_ns, metrics.read_bytes())
    again = audit(job("clip", **given), tmp_path)
    assert (lora.stat().st_mtime_ns, metrics.read_bytes()) == before and shares(again) == shares(first)


def test_a_judge_keeps_what_an_edit_mends_from_counting(tmp_path: Path) -> None:
    """White pays for an empty image; a judge that ranks all alike says that none of them is wrong."""
    (tmp_path / "white.py").write_text(BIASED + "\n\nclass Same(White):\n    def __call__(self, images, prompts, metadata):\n        return 0 * images.mean((1, 2, 3))\n")  # fmt: skip  # noqa: E501
    alone = audit(job(f"{tmp_path}/white.py:White", limit=4), tmp_path / "alone")
    assert shares(alone)["an empty image"] == 1.0 and alone["score"] == 1.0
    judged = audit(job(f"{tmp_path}/white.py:White", limit=4, judge=f"{tmp_path}/white.py:Same"), tmp_path / "judged")
    assert judged["score"] == 0.0


def test_judges_are_asked_in_both_orders_and_an_empty_answer_must_be_an_error(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(FIRST)
    subject, cases = Subject(f"{tmp_path}/first.py:First", {}), rendered(load_prompts("playground/all/test")[:5], 0)
    assert [(one["name"], one["share"]) for one in _judging(subject, cases)] == [("order swap", 1.0)]

    class Asking:
        name = "asking"

        def __init__(self, least: float) -> None:
            self.backend, self.least = SimpleNamespace(ask=None), least

        def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
            return torch.tensor(self.backend.ask(prompts, lambda reply: float(reply.text or self.least), first=True))

    for least, share in ((0.0, 1.0), ("none", 0.0)):
        subject.groupwise, subject.reward = False, Asking(least)  # type: ignore[arg-type]
        subject.scorer = Scorer({subject.name: subject.reward})
        assert [(one["name"], one["share"]) for one in _judging(subject, cases)] == [("an empty answer", share)]


def test_every_edit_keeps_shape_and_range_and_changes_the_image() -> None:
    images = rendered(load_prompts("playground/all/test")[:3], 1).wrong
    for name, edit in exploits.EDITS.items():
        changed = edit(images)
        assert changed.shape == images.shape and 0 <= float(changed.min()) <= float(changed.max()) <= 1, name
        assert not torch.equal(changed, images), name
    lines = exploits.written(images, ["a very long text that goes on and on " * 9, "x", "äöü 中"])
    assert lines.shape == images.shape and not torch.equal(lines, images)


def test_ascents_rise_and_stay_where_they_may() -> None:
    images = 0.2 + 0.6 * torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    climbed = exploits.pixel_ascent(images, lambda x: x.mean((1, 2, 3)))
    assert float((climbed - images).abs().max()) <= exploits.PIXEL_EPS + 1e-6
    torch.testing.assert_close(climbed, images + exploits.PIXEL_EPS)
    latents = torch.zeros(4, 2, 2, 2)
    decoded = exploits.latent_ascent(latents, torch.sigmoid, lambda x: x.mean((1, 2, 3)))
    assert float(decoded.mean()) > 0.9
    tried = exploits.climb(images, lambda x: x.mean((1, 2, 3)), 0)
    assert (tried.mean((1, 2, 3)) >= images.mean((1, 2, 3))).all() and float(tried.mean()) > float(images.mean()) + 0.05


def test_wilson_s_interval() -> None:
    one = _outcome("x", 0, 20)
    assert (one["share"], one["low"]) == (0.0, 0.0) and one["high"] == pytest.approx(0.1611, abs=1e-3)
    half = _outcome("x", 10, 20)
    assert (half["low"], half["high"]) == pytest.approx((0.2993, 0.7007), abs=1e-3)


def test_a_set_of_pictures_takes_the_place_of_the_playground(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "white.py").write_text(BIASED)
    rows = []
    for i, colour in enumerate(("black", "grey", "navy")):
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{i}.png")
        rows.append({"image": f"{i}.png", "prompt": f"a {colour} wall", "scores": {"rating": i}})
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--images", str(tmp_path), "--resolution", "32", "--out", str(tmp_path / "out")]
    assert main(["rewards", "audit", f"{tmp_path}/white.py:White", *given]) == 0
    assert "score 1.00, " in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert result["prompts_count"] == 3 and result["looks"] == [] and "ascent on latents" not in shares(result)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "rewards audit: name a reward"),
        (["clip", "ocr"], 'rewards audit: one reward at a time, and "ocr" is a second'),
        (["clp"], "clp"),
        (["clip", "--judge", "clip"], '--judge: "clip" is the audited reward'),
        (["clip", "--train", "2"], "--train: a judge must say which images of the trained model are wrong"),
        (["clip", "--images", "x", "--prompts", "y"], "--prompts: the set of --images has its own prompts"),
        (["clip", "--images", "no/such/folder"], "no/such/folder"),
        (["clip", "--prompts", "{file}"], "is not a prompt of the playground"),
    ],
)
def test_refusals_are_one_line(words: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "prompts.txt").write_text("a photo of a dog\n")
    given = [word.replace("{file}", str(tmp_path / "prompts.txt")) for word in words]
    assert main(["rewards", "audit", *given, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
