"""The OCR reward on RapidOCR's real weights: fonts and sizes, several targets, case, and Flow-GRPO's published rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lettering import FONTS, SIZES, WORDS, picture

from diffrl.errors import UserError
from diffrl.rewards import load_reward


def test_five_fonts_in_three_sizes_are_read_exactly() -> None:
    """At least 95 % of words: cut out as lines without detection, and (one each) in a larger image with detection."""
    assert len(FONTS) == 5 and len(SIZES) == 3
    line, square = (load_reward("ocr", detect=detect, threads=1) for detect in (False, True))
    rng, lines, squares = np.random.default_rng(0), [], []
    for i, font in enumerate(FONTS):
        for j, size in enumerate(SIZES):
            for k in range(2):
                word = WORDS[(3 * i + j + 3 * k) % len(WORDS)]
                lines.append(line(picture(word, font, size, rng, None)[None], [f'"{word}"'], [{}]).item())
            squares.append(square(picture(word, font, size, rng, 256)[None], [f'"{word}"'], [{}]).item())
    assert np.mean([score == 1.0 for score in lines]) >= 0.95, lines
    assert np.mean([score == 1.0 for score in squares]) >= 0.9, squares  # 15 images: one may fail


def reads(monkeypatch: pytest.MonkeyPatch, text: str, **params: Any) -> Any:
    """A function from a prompt (and metadata) to its score when `text` is in the image."""
    reward: Any = load_reward("ocr", threads=1, **params)
    monkeypatch.setattr(reward, "read", lambda images: [text] * len(images))

    def score(prompt: str, **metadata: Any) -> float:
        assert reward.applies(prompt, metadata)
        return reward(torch.zeros(1, 3, 8, 8), [prompt], [metadata]).item()

    return score


def test_several_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = 'a door with "PUSH" beside one with "pull"'
    in_order, swapped, more = "Push pull", "pull PUSH", "welcome pull here PUSH now"
    for text, joined, each in ((in_order, 1.0, 1.0), (swapped, 0.5, 1.0), (more, 0.0, 1.0), ("push", 0.5, 0.75)):
        assert reads(monkeypatch, text)(prompt) == pytest.approx(joined), text
        # "push" holds half of "pull": two letters are right
        assert reads(monkeypatch, text, targets="each")(prompt) == pytest.approx(each), text
    assert reads(monkeypatch, "push", targets="first")(prompt) == 1.0
    with pytest.raises(UserError, match=r'unknown targets "all" \(choose from: each, first, joined\)'):
        load_reward("ocr", targets="all")


def test_targets_may_come_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    score = reads(monkeypatch, "stop")
    assert score("a sign", text="Stop") == 1.0 and score('a sign "go"', text="stop") == 1.0
    assert reads(monkeypatch, "b a", targets="each")("signs", text=["a", "b"]) == 1.0
    assert not load_reward("ocr", threads=1).applies("a sign", {"text": " "})  # type: ignore[attr-defined]


def test_case_counts_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads(monkeypatch, "Open Now")('"OPEN NOW"') == 1.0
    assert reads(monkeypatch, "Open Now", case=True)('"OPEN NOW"') == pytest.approx(1 - 5 / 7)
    assert reads(monkeypatch, "OPENNOW", case=True)('"OPEN NOW"') == 1.0


def distance(a: str, b: str) -> int:
    """Levenshtein's recursion as it is defined."""
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))


@pytest.mark.parametrize("text", ["", "Hel", "hello", "xHELLOx", "h e l l o!", "jelly", "goodby"])
def test_flow_grpos_rule(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The first text in double quotes; spaces out, lower case; 0 edits if contained, at most its length otherwise."""
    prompt = 'A card that says "Hello", and "never mind" below'
    target, found = prompt.split('"')[1].replace(" ", "").lower(), text.replace(" ", "").lower()
    edits = 0 if target in found else min(distance(found, target), len(target))
    score = reads(monkeypatch, text, targets="first", contained=True)(prompt)
    assert score == pytest.approx(1 - edits / len(target))


def test_the_nearest_place_is_found() -> None:
    from diffrl_zoo.ocr import edit_distance

    rng = np.random.default_rng(0)
    for _ in range(60):
        a, b = ("".join(rng.choice(list("abc"), n)) for n in (rng.integers(1, 5), rng.integers(0, 7)))
        parts = {b[i:j] for i in range(len(b) + 1) for j in range(i, len(b) + 1)}
        assert edit_distance(a, b) == distance(a, b)
        assert edit_distance(a, b, anywhere=True) == min(distance(a, part) for part in parts)
