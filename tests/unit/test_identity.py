"""What makes a run the same run: which differences a resume allows, on its own or on purpose, and which never."""

from __future__ import annotations

import pytest

from diffrl import __version__
from diffrl.errors import UserError
from diffrl.records.changes import compare
from diffrl.records.identity import identity_of_config

VALUES = {
    "model": "playground",
    "seed": 0,
    "epochs": 4,
    "prompts": {"train": "a.txt", "test": "b.txt"},
    "lora": {"rank": 4},
    "objective": "nft",
    "nft": {"beta": 0.1},
    "rewards": {"clip": {"weight": 1.0, "timeout": 5.0, "device": "cpu", "model": "B"}},
    "watch": {"ocr": {"weight": 1.0}, "jpeg": {"weight": 1.0}},
    "gardo": {"auxiliary": ["jpeg"]},
    "optimise": {"learning_rate": 1e-3, "micro_batch": 64, "ema": {"decay": 0.9}},
    "evaluate": {"every": 2, "features": "clip"},
    "engine": {"compile": False, "optimiser": "adamw"},
}


def changed(key: str, value: object) -> dict:
    """The identity with another value at a key."""
    name, _, rest = key.partition(".")
    values = {**VALUES}
    if rest:
        inner, _, leaf = rest.partition(".")
        section = {**values[name]}
        section[inner] = {**section[inner], leaf: value} if leaf else value
        values[name] = section
    else:
        values[name] = value
    return identity_of_config(values, {"jpeg"})


SAME = identity_of_config(VALUES, {"jpeg"})


def test_what_shapes_a_run_is_in_and_what_does_not_is_out() -> None:
    assert SAME["diffrl_version"] == __version__ and SAME["prompts.train"] == "a.txt" and SAME["nft.beta"] == 0.1
    assert SAME["rewards.clip.model"] == "B" and SAME["watch.jpeg.weight"] == 1.0
    out = ("epochs", "prompts.test", "rewards.clip.timeout", "rewards.clip.device", "watch.ocr.weight")
    assert not set(out) & set(SAME) and not any(key.startswith("optimise.micro_batch") for key in SAME)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", 9),
        ("prompts.test", "c.txt"),
        ("optimise.micro_batch", 0.25),
        ("optimise.micro_batch", "auto"),  # the run wrote down what it found
        ("evaluate.every", 1),
        ("engine.compile", True),
        ("rewards.clip.timeout", None),
        ("rewards.clip.device", "cuda"),
        ("watch.ocr.weight", 2.0),
    ],
)
def test_what_may_change_on_its_own(key: str, value: object) -> None:
    assert compare(SAME, changed(key, value), "step-1") == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("prompts.train", "c.txt"),
        ("nft.beta", 0.2),
        ("rewards.clip.weight", 2.0),
        ("rewards.clip.model", "L"),
        ("watch.jpeg.weight", 2.0),
        ("gardo.auxiliary", ["ocr"]),
        ("optimise.learning_rate", 1e-4),
        ("evaluate.features", "pixels"),
    ],
)
def test_what_may_change_only_on_purpose(key: str, value: object) -> None:
    now = changed(key, value)
    with pytest.raises(UserError, match=rf"^{key}: .*, but step-1 was trained with .* add --override {key}$"):
        compare(SAME, now, "step-1")
    for override in (key, key.split(".")[0]):
        found = compare(SAME, now, "step-1", [override])
        assert [(change.key, change.now) for change in found] == [(key, value)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "x/y"),
        ("objective", "crd"),
        ("lora.rank", 8),
        ("optimise.ema.decay", 0.0),
        ("engine.optimiser", "adamw8bit"),
    ],
)
def test_what_cannot_change(key: str, value: object) -> None:
    with pytest.raises(UserError, match="start a new run"):
        compare(SAME, changed(key, value), "step-1", [key.split(".")[0]])


def test_rewards_and_methods_cannot_come_and_go() -> None:
    without = {key: value for key, value in SAME.items() if not key.startswith("gardo")}
    with pytest.raises(UserError, match="gardo keeps a state of its own"):
        compare(SAME, without, "step-1", ["gardo"], ["gardo"])
    more = {**SAME, "rewards.ocr.weight": 1.0}
    with pytest.raises(UserError, match="one entry for each reward"):
        compare(SAME, more, "step-1", ["rewards"])


def test_another_version_is_another_run_unless_one_says_so() -> None:
    older = {**SAME, "diffrl_version": "0.0.9"}
    with pytest.raises(UserError, match=r'diffrl_version: ".*", but step-1 was trained with "0.0.9"'):
        compare(older, SAME, "step-1")
    assert len(compare(older, SAME, "step-1", ["diffrl_version"])) == 1


def test_what_a_name_stands_for_goes_by_the_name() -> None:
    then, now = ({**SAME, "prompts.train (texts)": digest} for digest in ("abc", "def"))
    with pytest.raises(UserError, match=r"prompts.train: the texts changed since step-1; .* --override prompts.train"):
        compare(then, now, "step-1")
    assert len(compare(then, now, "step-1", ["prompts.train"])) == 1


def test_an_override_of_nothing_is_a_slip() -> None:
    with pytest.raises(UserError, match=r'--override: "optimise.learning_rat" is nothing .*"optimise.learning_rate"'):
        compare(SAME, SAME, "step-1", ["optimise.learning_rat"])
    assert compare(SAME, SAME, "step-1", ["optimise.learning_rate"]) == []


def test_what_no_override_helps_is_said_first() -> None:
    now = changed("seed", 1) | {"objective": "grpo"}
    with pytest.raises(UserError, match=r'^objective: "grpo", but .* start a new run'):
        compare(SAME, now, "step-1")
    with pytest.raises(UserError, match=r"^rewards.ocr.weight: 1.0, but step-1 was trained without it;"):
        compare(SAME, {**SAME, "rewards.ocr.weight": 1.0}, "step-1")
