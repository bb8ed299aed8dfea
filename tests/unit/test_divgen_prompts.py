"""DivGenBench's prompts: the paper's counts, every keyword equally often, no duplicates, no contradictions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from diffrl.divgen.prompts import DIMENSIONS, SMALL, benchmark, small, write_prompts
from diffrl.errors import UserError
from diffrl.prompts import Prompt, load_prompts
from diffrl_playground.grammar import parse
from scripts.prompts.divgen import keywords

GENERAL, PLAYGROUND = benchmark(), benchmark("playground")


def of(dimension: str, prompts: list[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.metadata["dimension"] == dimension]


def is_even(values: list[object]) -> bool:
    counts = Counter(values).values()
    return max(counts) - min(counts) <= 1


def test_the_counts_are_the_papers() -> None:
    assert len(GENERAL) == 3200 and len({prompt.text for prompt in GENERAL}) == 3200
    assert [len(of(dimension, GENERAL)) for dimension in DIMENSIONS] == [800] * 4
    words = {dimension: {p.metadata["keyword"] for p in of(dimension, GENERAL)} for dimension in DIMENSIONS}
    assert {dimension: len(words[dimension]) for dimension in DIMENSIONS} == {
        "id": 40,
        "style": 27,
        "layout": 80,
        "tonal": 18,
    }


@pytest.mark.parametrize(
    ("dimension", "keys"),
    [
        ("id", ["keyword", "age", "ethnicity", "gender"]),
        ("style", ["keyword", "base"]),
        ("layout", ["keyword", "number"]),
        ("tonal", ["keyword", "base"]),
    ],
)
def test_every_keyword_is_used_equally_often(dimension: str, keys: list[str]) -> None:
    for key in keys:
        assert is_even([prompt.metadata[key] for prompt in of(dimension, GENERAL)]), key


def test_the_templates() -> None:
    texts = [of(dimension, GENERAL)[0].text for dimension in DIMENSIONS]
    assert texts == [
        "a high-quality portrait photo of a young Asian man with a five o'clock shadow",
        "a painting in the style of Abstract Expressionism, depicting a fishing boat pulled up on a pebble beach",
        "a studio shot of two people on a clean white background",
        "an image of a fishing boat pulled up on a pebble beach, rendered with highly saturated properties",
    ]
    assert any(" of an elderly " in prompt.text for prompt in of("id", GENERAL))
    assert not any(" a elderly" in prompt.text for prompt in GENERAL)


def test_no_portrait_contradicts_itself() -> None:
    limits = keywords()["id"]["attributes"]
    for prompt in of("id", GENERAL):
        said = prompt.metadata
        assert all(said[axis] in allowed for axis, allowed in limits[said["keyword"]].items()), prompt.text
        assert " ".join((said["age"], said["ethnicity"], said["gender"])) in prompt.text
    assert limits["a goatee"] == {"gender": ["man"]} and limits["gray hair"]["age"] == ["middle-aged", "elderly"]


def test_a_layout_names_its_objects_and_their_numbers() -> None:
    numbers = {value: word for word, value in keywords()["layout"]["numbers"].items()}
    plurals = keywords()["layout"]["objects"]
    shots = of("layout", GENERAL)
    assert Counter(len(p.metadata["objects"]) for p in shots) == {1: 320, 2: 480}
    for prompt in shots:
        objects = prompt.metadata["objects"]
        named = " and ".join(f"{numbers[count]} {plurals[name]}" for name, count in objects.items())
        assert prompt.text == f"a studio shot of {named} on a clean white background"
    assert is_even([list(p.metadata["objects"])[1] for p in shots if len(p.metadata["objects"]) == 2])


def test_the_playgrounds_prompts_are_of_its_grammar() -> None:
    assert len(PLAYGROUND) == 3200 and len({prompt.text for prompt in PLAYGROUND}) == 3200
    assert [len(of(dimension, PLAYGROUND)) for dimension in DIMENSIONS] == [800] * 4
    for prompt in PLAYGROUND:
        assert parse(prompt.text).text() == prompt.text
    for dimension in DIMENSIONS:
        assert is_even([prompt.metadata["keyword"] for prompt in of(dimension, PLAYGROUND)]), dimension
    assert {parse(p.text).attributes["style"] for p in of("style", PLAYGROUND)} == {"filled", "outlined", "striped"}
    assert {parse(p.text).attributes["tone"] for p in of("tonal", PLAYGROUND)} == {"plain", "dark", "pale"}


@pytest.mark.parametrize("prompts", [GENERAL, PLAYGROUND], ids=["general", "playground"])
def test_the_small_set_is_even_too(prompts: list[Prompt]) -> None:
    few = small(prompts)
    assert [len(of(dimension, few)) for dimension in DIMENSIONS] == [SMALL] * 4
    for dimension in DIMENSIONS:
        assert is_even([prompt.metadata["keyword"] for prompt in of(dimension, few)]), dimension


def test_the_prompts_are_the_same_in_every_call() -> None:
    assert [p.text for p in benchmark()] == [p.text for p in GENERAL]
    assert [p.text for p in benchmark("playground")] == [p.text for p in PLAYGROUND]


def test_other_base_prompts_and_other_totals(tmp_path: Path) -> None:
    base = tmp_path / "base.txt"
    base.write_text("\n".join(f"scene {i}" for i in range(54)) + "\n")  # shares factors with 27 and 18
    prompts = benchmark(base=str(base))
    assert len({prompt.text for prompt in prompts}) == 3200
    assert is_even([p.metadata["base"] for p in of("style", prompts)])
    assert [len(of(dimension, benchmark(total=10, base=str(base)))) for dimension in DIMENSIONS] == [3, 3, 2, 2]
    base.write_text("\n".join(f"scene {i}" for i in range(20)) + "\n")
    with pytest.raises(UserError, match="27 keywords x 20 base prompts give fewer"):
        benchmark(base=str(base))
    with pytest.raises(UserError, match="different ones"):
        benchmark("playground", total=200_000)


def test_a_written_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "some" / "prompts.jsonl"
    write_prompts(GENERAL[:900], path)
    read = load_prompts(str(path))
    assert [(p.text, dict(p.metadata)) for p in read] == [(p.text, dict(p.metadata)) for p in GENERAL[:900]]
    assert json.loads(path.read_text().splitlines()[800])["dimension"] == "style"
