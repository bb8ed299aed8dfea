"""The verifier's processes beside a training: the same verdicts, whatever becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from diffrl_playground import beside
from diffrl_playground.grammar import parse
from diffrl_playground.renderer import render
from diffrl_playground.scenes import complete
from diffrl_playground.verifier import judged, verify

PROMPTS = ["a red circle", "two blue squares", "a green heart", "a yellow star on black"] * 6


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([render(complete(parse(prompt), rng)) for prompt in PROMPTS])


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(beside, "spare", lambda: 2)
    monkeypatch.setattr(beside, "_others", None)
    monkeypatch.setattr(beside, "_off", False)
    yield
    if beside._others is not None:
        beside._others.close()


def test_cores_decide_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, wanted in ((2, 1, 0), (4, 1, 3), (16, 1, 8), (16, 4, 3), (16, 8, 0)):
        monkeypatch.setattr(beside.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert beside.spare() == wanted


def test_verdicts_are_the_same_and_a_dead_process_costs_none(
    two: None, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = judged(pixels, PROMPTS)
    assert beside.ask(pixels, PROMPTS) == here == verify(pixels, PROMPTS)
    with monkeypatch.context() as patch:
        patch.setattr(beside, "ask", None)
        assert verify(pixels[:4], PROMPTS[:4]) == here[:4]  # few images are judged here
    with pytest.raises(ValueError, match="nothing of the world"):
        beside.ask(pixels, [*PROMPTS[:-1], "nothing of the world"])
    assert beside.ask(pixels, PROMPTS) == here  # which ended no process
    assert beside._others is not None
    beside._others.processes[0].kill()
    with caplog.at_level(logging.WARNING):
        assert verify(pixels, PROMPTS) == here == verify(pixels, PROMPTS)
    assert len(caplog.records) == 1 and beside._others is None
