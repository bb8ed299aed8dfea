"""Variety: 1 for true renderings at any group size, 0 for one picture, and a free fact's share where one is ignored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffrl.additions.verdict import Guard
from diffrl_playground.grammar import Caption, parse, understood
from diffrl_playground.renderer import render
from diffrl_playground.scenes import complete, free, sample_caption
from diffrl_playground.variety import differing, tally
from experiments.variety import variety, variety_of_readings


def truth(group: int, prompts: int, ignored: str = "", seed: int = 3) -> dict[str, dict[str, list[str | None]]]:
    """What true renderings of random prompts show; of the fact `ignored` always the same."""
    rng = np.random.default_rng(seed)
    table: dict[str, dict[str, list[str | None]]] = {}
    while len(table) < prompts:
        caption = sample_caption(rng, "test")
        scenes = [complete(caption, rng) for _ in range(group)]
        table[caption.text()] = {
            name: [scenes[0 if name == ignored else i][name] for i in range(group)] for name in free(caption)
        }
    return table


@pytest.mark.parametrize(("group", "prompts"), [(4, 1200), (8, 600), (24, 300)])
def test_true_renderings_have_one_at_any_group_size(group: int, prompts: int) -> None:
    found = variety_of_readings(truth(group, prompts))
    assert found.value == pytest.approx(1.0, abs=0.02) and found.unreadable == 0.0


def test_a_fact_that_is_ignored_costs_its_share_exactly() -> None:
    table = truth(8, 300)
    whole = variety_of_readings(table)
    without = variety_of_readings(truth(8, 300, ignored="background"))
    shares = [
        share for p, found in table.items() for name, share in tally(p, found).shares.items() if name == "background"
    ]
    facts = sum(len(found) for found in table.values())
    assert whole.value is not None and without.value is not None
    assert whole.value - without.value == pytest.approx(sum(shares) / facts, abs=1e-9)
    assert without.by_fact["background"] == 0.0 and without.by_fact["color"] == whole.by_fact["color"]


def test_pictures_are_read_and_one_repeated_picture_has_none() -> None:
    rng = np.random.default_rng(0)
    prompts = ["a heart", "two stars on black", "a star left of a circle", "a smiling head", 'the word "lax"']
    groups = [[render(complete(parse(prompt), rng)) for _ in range(6)] for prompt in prompts]
    texts = [prompt for prompt in prompts for _ in range(6)]
    found = variety(np.stack([image for group in groups for image in group]), texts)
    assert found.value is not None and 0.8 < found.value < 1.2 and found.unreadable == 0.0
    assert variety(np.stack([group[0] for group in groups for _ in group]), texts).value == 0.0


def test_the_unreadable_is_counted_and_makes_no_number() -> None:
    blank = np.full((4, 64, 64, 3), 250, np.uint8)
    found = variety(blank, ["a heart on white"] * 4)
    assert (
        found.value is None and found.unreadable == 1.0 and found.readings == 4 * len(free(parse("a heart on white")))
    )


def test_the_estimate_has_no_bias() -> None:
    """Two values with chance 1/2: E[differing] = 1/2 for every group size."""
    rng = np.random.default_rng(1)
    for n in (2, 3, 8):
        draws = [differing([str(v) for v in rng.integers(0, 2, n)]) for _ in range(4000)]
        assert np.mean(draws) == pytest.approx(0.5, abs=4 * np.std(draws) / np.sqrt(4000))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="2 images but 1 prompts"):
        variety(np.zeros((2, 64, 64, 3), np.uint8), ["a heart"])
    with pytest.raises(ValueError, match="not a prompt"):
        variety(torch.zeros(1, 3, 64, 64), ["a cat"])
    assert understood("a cat") is None and understood("a heart") == Caption("objects", {"shape": "heart"})


def test_the_guard_rail_asks_the_gold_measure_where_there_is_one() -> None:
    guard = Guard(trained=["clip"], watched=[])
    mended = [{"epoch": e, "eval/diversity": d, "eval/variety": v} for e, d, v in ((0, 0.6, 1.0), (1, 0.1, 0.9))]
    assert guard.alarms(mended) == []
    collapsed = [mended[0], mended[1] | {"eval/diversity": 0.6, "eval/variety": 0.3}]
    assert [alarm.key for alarm in guard.alarms(collapsed)] == ["diversity"]
    assert "variety is 30%" in guard.alarms(collapsed)[0].text
