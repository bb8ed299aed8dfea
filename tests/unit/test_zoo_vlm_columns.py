"""The judge's rubric with named columns, and the judge that compares with a reference: on the small HTTP server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_zoo_vlm import PROMPT, Judge, build, judge, lit

from diffrl.errors import UserError
from diffrl.prompts import Prompt
from diffrl.records.tracking import save_image
from diffrl.rewards import RewardError
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.scoring import Scorer
from diffrl_zoo.vlm.parse import read_columns
from diffrl_zoo.vlm.question import Reply, Unreadable
from diffrl_zoo.vlm.rubric import RUBRICS

__all__ = ["judge"]  # the fixture
NAMES = ("content", "text", "two words")


def test_columns_are_read_strictly() -> None:
    fine = "Think: content: 9\n\n**content: 4**\nText = N/A\ntwo words: 2.5.\n"
    content, text, words = read_columns(Reply(fine), NAMES, 1, 5)
    assert (content, words) == (4.0, 2.5) and math.isnan(text)
    for wrong in (
        "content: 4\ntext: 3",
        "content: 4\ntext: 3\ntwo words: 6",
        "content: 4\ntext: none\ntwo words: 2",
        "content: 4\ntext: 3\ntwo words: 2\ncontent: 3",
    ):
        with pytest.raises(Unreadable):
            read_columns(Reply(wrong), NAMES, 1, 5)


def test_one_request_gives_every_column(judge: Judge) -> None:
    own = {"rubric": {"content": "all is there", "text": "spelled right; n/a if there is none"}}
    entry = {"server": judge.url, "key": "DIFFRL_JUDGE_KEY", "backoff": 0.0, "low": 0.0, "high": 10.0, **own}
    entries = {name: Entry("vlm_rubric", entry, column=name) for name in ("text", "content")}
    scorer = Scorer(build_rewards(entries, torch.device("cpu")))
    assert scorer.rewards["text"].card.range == (0.0, 10.0)  # type: ignore[attr-defined]
    judge.script = ["content: 7\ntext: n/a", "content: 2.5\ntext: 9"]
    scores = scorer.score(lit(0.2, 0.4), [Prompt(PROMPT, {})] * 2)
    assert sorted(scores[:, 1].tolist()) == [2.5, 7.0] and int(scores[:, 0].isnan().sum()) == 1
    assert len(judge.requests) == 2
    text = judge.requests[0]["messages"][0]["content"][-1]["text"]
    assert PROMPT in text and "from 0 (very bad) to 10 (perfect)" in text and text.endswith("content: X\ntext: X")
    judge.script = ["content: 11\ntext: 1"] * 4
    assert scorer.score(lit(0.2), [Prompt(PROMPT, {})]).isnan().all()  # asked four times, and no score


def test_faults_are_counted_and_thinking_is_asked_for(judge: Judge) -> None:
    reward = build(judge, "vlm_rubric", rubric="faults", think=True)
    names = tuple(RUBRICS["faults"].criteria)
    assert reward.columns == names and reward.card.range == (-5.0, 0.0)
    judge.script = ["Looking closely.\n" + "\n".join(f"{name}: {i}" for i, name in enumerate(names))]
    assert reward(lit(0.5), [PROMPT], [{}]).tolist() == [[0.0, -1.0, -2.0, -3.0, -4.0]]
    text = judge.requests[0]["messages"][0]["content"][-1]["text"]
    assert "Think" in text or "think aloud" in text
    for wrong, message in (
        ({"rubric": "fault"}, 'nearest: "faults"'),
        ({"rubric": {}}, "expected general, faults"),
        ({"rubric": {"a:b": "x"}}, 'got "a:b"'),
        ({"low": 0.0}, "of your own"),
        ({"rubric": {"a": "x"}, "low": 3.0, "high": 3.0}, "low is 3"),
    ):
        with pytest.raises(UserError, match=message):
            build(judge, "vlm_rubric", **wrong)


@pytest.fixture
def references(tmp_path: Path) -> Path:
    """Two pictures of one prompt, of which the darker one is the better by `pairs`, and one of another without it."""
    for i, image in enumerate(lit(0.3, 0.7, 0.5)):
        save_image(image, tmp_path / f"{i}.png", {})
    rows: list[dict[str, Any]] = [
        {"images": ["0.png", "1.png"], "prompt": PROMPT, "scores": {"pairs": [0.9, 0.1], "clip": [0.1, 0.9]}},
        {"images": ["2.png"], "prompt": "another", "scores": {"pairs": [None], "clip": [0.3]}},
    ]
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_better_than_the_best_reference_of_the_prompt(judge: Judge, references: Path) -> None:
    """The judge says yes with 1/2 + (first - second) / 2 of the brightness."""
    for by, best in (("pairs", 0.3), ("clip", 0.7)):
        reward = build(judge, "vlm_better", references=str(references), by=by)
        assert reward.applies(PROMPT, {}) and reward.applies("another", {}) is (by == "clip")
        assert reward.remote and not reward.applies("a third", {})
        images = lit(0.1, 0.5, 0.9)
        scores = reward(images, [PROMPT] * 3, [{}] * 3)
        expected = 0.5 + (images.mean((1, 2, 3)) - round(255 * best) / 255) / 2
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_a_judge_that_prefers_a_place_gains_nothing(judge: Judge, references: Path) -> None:
    """Whatever it adds to the first image goes away in the mean of both orders."""
    whole = judge.answer

    def partial_judge(body: dict[str, Any]) -> dict[str, Any]:
        said = whole(body)
        top = said["logprobs"]["content"][0]["top_logprobs"]
        for entry in top:
            entry["logprob"] += 1.0 if "es" in entry["token"] else -1.0
        return said

    judge.answer = partial_judge  # type: ignore[method-assign]
    same = lit(0.3)
    both, first = (
        build(judge, "vlm_better", references=str(references), by="pairs", order=o) for o in ("both", "first")
    )
    assert float(both(same, [PROMPT], [{}])) == pytest.approx(0.5, abs=1e-5)
    assert float(first(same, [PROMPT], [{}])) > 0.8


def test_references_that_cannot_be_used(judge: Judge, references: Path) -> None:
    for given, message in (
        ({"references": str(references)}, "the set has clip, pairs; name one as `by`"),
        ({"references": str(references), "by": "pair"}, 'nearest: "pairs"'),
        ({"references": str(references / "none")}, "vlm_better: references: no file or folder"),
        ({"references": str(references), "by": "clip", "order": "second"}, 'unknown order "second"'),
    ):
        with pytest.raises(UserError, match=message):
            build(judge, "vlm_better", **given)
    reward = build(judge, "vlm_better", references=str(references), by="pairs")
    (references / "0.png").write_bytes(b"no picture")
    with pytest.raises(RewardError, match=r"vlm_better: .*images.jsonl:1: .*0.png is not a picture"):
        reward(lit(0.1), [PROMPT], [{}])
