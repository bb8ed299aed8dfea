"""The one judgement on hacking and collapse: when it speaks up, when it keeps quiet, and that all who ask agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffrl.additions.verdict import Guard, change
from diffrl.records.held_out import HeldOut
from diffrl.report.data import RunData, warnings_of

GUARD = Guard(trained=["proxy"], watched=["truth", "flaws"], lower={"flaws"})


def history(**columns: list[float | None]) -> list[dict[str, Any]]:
    """Evaluations every ten epochs with `eval/NAME` from each column."""
    rows = zip(*columns.values(), strict=True)
    return [
        {"epoch": 10 * i, **{f"eval/{name}": value for name, value in zip(columns, row, strict=True)}}
        for i, row in enumerate(rows)
    ]


def names(past: list[dict[str, Any]], guard: Guard = GUARD) -> list[str]:
    return [alarm.key for alarm in guard.alarms(past)]


def test_parted_for_three_evaluations_and_not_before() -> None:
    past = history(proxy=[0.1, 0.2, 0.3, 0.4, 0.5], truth=[0.5, 0.6, 0.5, 0.4, 0.3])
    assert [names(past[:n]) for n in range(1, 6)] == [[], [], [], [], HACKED]
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
    assert [alarm.key for alarm in GUARD.alarms(past, held)] == expected
    assert [alarm.key for alarm in GUARD.alarms(past)] == HACKED, "nothing is known of the prompts"


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


# proxy, truth (which is watched), diversity; what is found after each evaluation: "?" is a sign and no alarm
FALLS, RISES, STAYS = [0.6, 0.5, 0.4, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4, 0.5], [0.4] * 5
SIGN, HACKED = ["parted/truth?"], ["parted/truth"]
CURVES: dict[str, tuple[list[float | None], list[float | None], list[float | None], list[list[str]]]] = {
    "nothing": (RISES, RISES, STAYS, [[]] * 5),
    "hacked": (RISES, FALLS, STAYS, [[], SIGN, SIGN, HACKED, HACKED]),
    "hacked at the end": (RISES, [0.6, 0.6, 0.6, 0.6, 0.5], STAYS, [[]] * 4 + [SIGN]),
    "recovered": (RISES, [0.6, 0.5, 0.4, 0.3, 0.6], STAYS, [[], SIGN, SIGN, HACKED, []]),
    "both fall": (FALLS, FALLS, STAYS, [[]] * 5),
    "both fall after the peak": ([0.1, 0.5, 0.4, 0.3, 0.2], [0.5, 0.6, 0.5, 0.4, 0.3], STAYS, [[]] * 5),
    "a fall of 4 %": (RISES, [0.5, 0.49, 0.48, 0.48, 0.48], STAYS, [[]] * 5),
    "60 % of the diversity": (RISES, RISES, [0.4, 0.36, 0.32, 0.28, 0.24], [[]] * 5),
    "collapsed": (RISES, RISES, [0.4, 0.3, 0.19, 0.25, 0.1], [[], [], ["diversity"], [], ["diversity"]]),
    "hacked and collapsed": (
        RISES,
        FALLS,
        [0.4, 0.19, 0.19, 0.19, 0.19],
        [[], ["parted/truth?", "diversity"], ["parted/truth?", "diversity"], *[["parted/truth", "diversity"]] * 2],
    ),
    "destroyed": (RISES, [0.6, 0.6, None, None, None], [0.4, 0.4, 0.4, 0.1, None],
                  [[], [], ["missing/truth"], ["missing/truth", "diversity"], ["missing/truth", "missing/diversity"]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CURVES)
def test_curves_and_what_is_found_in_them(name: str, tmp_path: Path) -> None:
    """After every evaluation; and the alarms of a run are what its report says, with the signs that are none yet."""
    proxy, truth, diversity, expected = CURVES[name]
    past = history(proxy=proxy, truth=truth, diversity=diversity)
    config = {"rewards": {"proxy": {}}, "watch": {"truth": {}}}
    for count, wanted in enumerate(expected, start=1):
        findings = Guard.of(config, ()).judge(past[:count])
        assert [finding.key + "?" * (finding.severity == "sign") for finding in findings] == wanted
        alarms = Guard.of(config, ()).alarms(past[:count])
        assert [alarm.key for alarm in alarms] == [key for key in wanted if "?" not in key]
        told = [text for text in warnings_of(RunData(tmp_path, "run", past[:count], config)) if "finite" not in text]
        assert len(told) == len(findings), "the report has the same findings, no more and no fewer"
        assert all(finding.text in text for finding, text in zip(findings, told, strict=True))


def test_the_reports_limits_are_the_configs(tmp_path: Path) -> None:
    past = history(proxy=RISES, truth=FALLS, diversity=[0.4, 0.4, 0.4, 0.4, 0.3])
    config: dict[str, Any] = {"rewards": {"proxy": {}}, "watch": {"truth": {}}}
    limits = [{}, {"evaluations": 5, "diversity": 0.8}, {"evaluations": None, "diversity": None, "stop": True}]
    expected = [HACKED, ["parted/truth?", "diversity"], SIGN]
    for guard, wanted in zip(limits, expected, strict=True):
        run = RunData(tmp_path, "run", past, {**config, "guard": guard})
        assert [one.key + "?" * (one.severity == "sign") for one in run.guard.judge(past)] == wanted
        assert len(warnings_of(run)) == len(wanted)


def test_students_are_watched_for_what_is_trained() -> None:
    config = {"rewards": {"a": {}}, "watch": {"b": {}}, "evaluate": {"also": {"turbo": {}}}, "guard": None}
    assert list(Guard.of(config, ()).watched) == ["b", "turbo/a", "turbo/b"]


@pytest.mark.parametrize(("gains", "alarm"), [([0.1, 0.1, 0.1, 0.12], True), ([0.0, 0.0, 0.0, 0.4], False)])
def test_a_proxy_that_rose_by_the_choice_of_prompts_has_not_risen(gains: list[float], alarm: bool) -> None:
    past, held = history(proxy=[0.1, 0.2, 0.2, 0.2], truth=[0.6, 0.5, 0.4, 0.3]), HeldOut()
    for line in past:
        held.add(line["epoch"], {"proxy": [0.1 + (gain if line["epoch"] else 0.0) for gain in gains]})
    assert [one.key for one in GUARD.alarms(past, held)] == ["parted/truth"] * alarm


def test_a_change_is_better_only_where_a_paired_test_says_so() -> None:
    """Of the same mean change: all four prompts alike, one of four, two prompts, and nobody knows of the prompts."""
    before = {"epoch": 0, "eval/a": 0.5, "eval/fid": 0.5, "eval/saturation": 0.5, "eval/tiny": 0.5}
    after = {"epoch": 8, "eval/a": 0.6, "eval/fid": 0.6, "eval/saturation": 0.6, "eval/tiny": 0.500002}

    def moved(name: str, *gains: float, lower: tuple[str, ...] = ()) -> tuple[str, int]:
        held = HeldOut()
        held.add(0, {name: [0.5] * len(gains)})
        held.add(8, {name: [0.5 + gain for gain in gains]})
        found = change(name, before, after, held, lower)
        return found.text, found.sign

    assert moved("a", 0.1, 0.11, 0.09, 0.1) == ("+0.100", 1)
    assert moved("a", 0.0, 0.0, 0.0, 0.4) == ("+0.100", 0)
    assert moved("a", 0.08, 0.12) == ("+0.100", 0), "t of 5 with one degree of freedom"
    assert moved("a") == ("+0.100", 0)
    assert moved("fid", 0.1, 0.11, 0.09, 0.1, lower=("fid",)) == ("+0.100", -1)
    assert moved("saturation", 0.1, 0.11, 0.09, 0.1) == ("+0.100", 0), "nobody says what is better"
    assert moved("tiny", *[0.000002 + 1e-8 * i for i in range(4)]) == ("+0.00000", 0), 'no "better" for +0.000'
