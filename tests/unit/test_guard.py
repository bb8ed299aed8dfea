"""The guard rails: when they speak up, and when they keep quiet."""

from __future__ import annotations

from typing import Any

import pytest

from diffrl.records.guard import Guard
from diffrl.records.held_out import HeldOut

GUARD = Guard(trained=["proxy"], watched=["truth", "flaws"], lower={"flaws"})


def history(**columns: list[float | None]) -> list[dict[str, Any]]:
    """Evaluations every ten epochs with `eval/NAME` from each column."""
    rows = zip(*columns.values(), strict=True)
    return [
        {"epoch": 10 * i, **{f"eval/{name}": value for name, value in zip(columns, row, strict=True)}}
        for i, row in enumerate(rows)
    ]


def names(past: list[dict[str, Any]], guard: Guard = GUARD) -> list[str]:
    return [alarm.name for alarm in guard.alarms(past)]


def test_parted_for_three_evaluations_and_not_before() -> None:
    past = history(proxy=[0.1, 0.2, 0.3, 0.4, 0.5], truth=[0.5, 0.6, 0.5, 0.4, 0.3])
    assert [names(past[:n]) for n in range(1, 6)] == [[], [], [], [], ["parted/truth"]]
    (alarm,) = GUARD.alarms(past)
    assert "truth" in alarm.text and "0.600 in epoch 10 to 0.300 in epoch 40" in alarm.text


def test_an_evaluation_in_between_that_agrees_starts_the_count_again() -> None:
    past = history(proxy=[0.1, 0.2, 0.3, 0.4, 0.5], truth=[0.6, 0.5, 0.65, 0.5, 0.4])
    assert names(past) == []


def test_of_flaws_a_lower_number_is_better() -> None:
    past = history(proxy=[0.1, 0.2, 0.3, 0.4], flaws=[0.1, 0.2, 0.3, 0.4])
    assert names(past) == ["parted/flaws"]
    assert names(history(proxy=[0.1, 0.2, 0.3, 0.4], flaws=[0.4, 0.3, 0.2, 0.1])) == []


def test_both_falling_is_no_hacking() -> None:
    assert names(history(proxy=[0.5, 0.4, 0.3, 0.2], truth=[0.6, 0.5, 0.4, 0.3])) == []


def test_a_little_worse_is_noise() -> None:
    assert names(history(proxy=[0.1, 0.2, 0.3, 0.4], truth=[0.5, 0.495, 0.495, 0.495])) == []


@pytest.mark.parametrize(("fell", "expected"), [([0.0, 0.0, 0.0, 0.4], []), ([0.1, 0.1, 0.09, 0.11], ["parted/truth"])])
def test_a_fall_within_the_choice_of_prompts_is_noise(fell: list[float], expected: list[str]) -> None:
    """0.1 less in the mean: from one prompt of four, or from all of them."""
    past = history(proxy=[0.1, 0.2, 0.3, 0.4], truth=[0.5, 0.4, 0.4, 0.4])
    held = HeldOut()
    for line in past:
        now = fell if line["epoch"] else [0.0] * 4
        held.add(line["epoch"], {"truth": [0.5 - part for part in now]})
    assert [alarm.name for alarm in GUARD.alarms(past, held)] == expected
    assert [alarm.name for alarm in GUARD.alarms(past)] == ["parted/truth"], "nothing is known of the prompts"


def test_a_value_that_applies_to_nothing_is_left_out() -> None:
    past = history(proxy=[0.1, 0.2, 0.3, 0.4, 0.5], truth=[0.6, 0.5, None, 0.4, 0.3])
    assert names(past) == ["parted/truth"]


@pytest.mark.parametrize(("now", "expected"), [(0.21, []), (0.19, ["diversity"])])
def test_diversity_below_half_of_the_base_models(now: float, expected: list[str]) -> None:
    assert names(history(diversity=[0.4, now])) == expected
    assert names(history(diversity=[0.4, now]), Guard([], [], diversity=None)) == []


@pytest.mark.parametrize(("now", "expected"), [(0.55, []), (0.65, ["saturation"]), (0.15, ["saturation"])])
def test_saturation_outside_of_the_base_models_range(now: float, expected: list[str]) -> None:
    past = history(saturation=[0.4, now])
    past[0]["eval/saturation/std"] = 0.1
    assert names(past) == expected


def test_the_base_model_alone_raises_no_alarm() -> None:
    assert names(history(proxy=[0.1], truth=[0.5], diversity=[0.3])) == []


@pytest.mark.parametrize("gone", [None, float("nan")])
def test_what_cannot_be_measured_any_more_is_an_alarm(gone: float | None) -> None:
    assert names(history(proxy=[0.1, 0.2], truth=[0.5, gone])) == ["missing/truth"]
    assert names(history(proxy=[0.1, gone], truth=[0.5, 0.5])) == ["missing/proxy"]
    assert names(history(proxy=[0.1, 0.2, gone, 0.2], truth=[0.5] * 4)) == [], "it is there again"
    assert names(history(proxy=[0.1, 0.2], truth=[gone, gone])) == [], "it never was measured"


def test_images_without_any_readable_fact_have_no_variety_left() -> None:
    """A learning rate of 1: noise, of which nothing can be read, has no key "variety" at all."""
    past = history(proxy=[0.1, 0.2], truth=[0.5, 0.5], variety=[0.9, None], diversity=[0.4, 0.4])
    del past[1]["eval/variety"]
    assert names(past) == ["missing/variety"]
    (alarm,) = GUARD.alarms(past)
    assert alarm.text == "variety cannot be measured any more: it was 0.900 in epoch 0"
    turbo = Guard(trained=[], watched=["turbo/proxy"])
    past = [{"epoch": 0, "eval/turbo/variety": 0.9}, {"epoch": 1}]
    assert names(past, turbo) == ["missing/turbo/variety"]


def test_what_a_resume_watches_no_longer_is_not_missed() -> None:
    past = [{"epoch": 0, "eval/proxy": 0.5, "eval/other": 0.5}, {"epoch": 1, "eval/proxy": 0.5}]
    assert names(past) == []
