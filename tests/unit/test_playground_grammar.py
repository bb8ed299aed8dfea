"""The playground's language: prompts, facts, splits."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from diffrl.playground import grammar
from diffrl.playground.grammar import Head, Scene, Thing, facts, misdescribe, parse, prompt_set, sample_scene
from diffrl.playground.tokenizer import clashes


def scenes(count: int, split: str = "train", subset: str = "all") -> list[Scene]:
    rng = np.random.default_rng(7)
    return [sample_scene(rng, split, subset) for _ in range(count)]


def tokens(text: str) -> int:
    """CLIP-style: a token per word, mark and quoted letter, and the begin and end tokens."""
    quoted = sum(len(word) - 1 for word in re.findall(r'"(\w+)"', text))
    return len(re.findall(r"\w+|[^\w\s]", text)) + quoted + 2


@pytest.mark.parametrize(
    ("scene", "text"),
    [
        (Scene("objects", (Thing("circle", "red"),), "white"), "a red circle on white"),
        (Scene("objects", (Thing("star", "orange"),), "gray", style="dotted"), "an orange star on gray, dotted"),
        (Scene("counts", (Thing("cross", "red"),), "black", 3, tone="dark"), "three red crosses on black, dark"),
        (
            Scene("pairs", (Thing("circle", "red"), Thing("square", "blue")), "gray", style="striped", tone="pale"),
            "a red circle and a blue square on gray, striped, pale",
        ),
        (
            Scene("relations", (Thing("circle", "red"), Thing("square", "blue")), "white", relation="left of"),
            "a red circle left of a blue square on white",
        ),
        (Scene("words", (Thing("word", "red"),), "white", word="kup"), 'the word "kup" in red on white'),
        (
            Scene("heads", (), "white", head=Head("tan", "red", "smiling", True, True)),
            "a smiling tan head with red hair, glasses and a hat on white",
        ),
        (
            Scene("heads", (), "black", head=Head("light", "blue", "frowning", False, False)),
            "a frowning light head with blue hair on black",
        ),
    ],
)
def test_text_and_parse_are_inverse(scene: Scene, text: str) -> None:
    assert scene.text() == text
    assert parse(text) == scene


def test_every_sampled_scene_parses_back_and_fits_16_tokens() -> None:
    for scene in scenes(3000):
        assert parse(scene.text()) == scene
        assert tokens(scene.text()) <= 16, scene.text()


@pytest.mark.parametrize(
    "text",
    [
        "a red circle",
        "a orange circle on white",
        "five red circles on white",
        "three red crosss on white",
        "a red circle on white, dark, dotted",
        "three red circles on white, dotted",
        'the word "kup" in red on white, dark',
        "a smiling tan head with red hair glasses on white",
        "a cat",
        "",
    ],
)
def test_other_prompts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a prompt of the playground"):
        parse(text)


def test_facts_name_what_is_said() -> None:
    def named(text: str) -> list[tuple[str, str]]:
        return [(fact.name, fact.wanted) for fact in facts(parse(text))]

    assert named("three red circles on black, dark") == [
        ("count", "3"),
        ("shape", "circle"),
        ("color", "red"),
        ("background", "black"),
        ("tone", "dark"),
    ]
    assert named("a red circle left of a blue star on white") == [
        ("shape/1", "circle"),
        ("color/1", "red"),
        ("shape/2", "star"),
        ("color/2", "blue"),
        ("relation", "left of"),
        ("background", "white"),
    ]
    assert named('the word "kup" in red on white') == [("color", "red"), ("background", "white")]
    assert dict(named("a smiling tan head with red hair and a hat on white")) == {
        "skin": "tan",
        "hair": "red",
        "mood": "smiling",
        "glasses": "no",
        "hat": "yes",
        "background": "white",
    }
    assert ("style", "striped") in named("a red circle on white, striped")


def test_splits_share_no_composition_and_no_word() -> None:
    content = {split: {scene.content() for scene in scenes(3000, split)} for split in grammar.SPLITS}
    assert not content["train"] & content["test"]
    assert not content["train"] & content["validation"]
    assert not content["test"] & content["validation"]
    tenths = Counter(grammar._split_of(f"{word}") for word in (f"word {i}" for i in range(4000)))
    assert tenths["train"] == pytest.approx(3200, abs=120)


def test_the_split_looks_through_style_tone_and_order() -> None:
    scene = parse("a red circle left of a blue star on white")
    assert scene.content() == parse("a blue star right of a red circle on white, dark").content()
    assert scene.content() != parse("a blue star left of a red circle on white").content()
    pair = parse("a red circle and a blue star on white")
    assert pair.content() == parse("a blue star and a red circle on white, striped").content()
    word = parse('the word "kup" in red on white')
    assert word.content() == replace(word, background="black").content() == "kup"


def test_shares_of_all_are_as_declared() -> None:
    found = scenes(6000)
    kinds = Counter(scene.kind for scene in found)
    for kind, share in grammar.KINDS.items():
        assert kinds[kind] / 6000 == pytest.approx(share, abs=0.02)
    eligible = [scene for scene in found if scene.kind in grammar.STYLED]
    assert np.mean([scene.style != "filled" for scene in eligible]) == pytest.approx(0.2, abs=0.03)
    eligible = [scene for scene in found if scene.kind in grammar.TONED]
    assert np.mean([scene.tone != "normal" for scene in eligible]) == pytest.approx(0.2, abs=0.03)


def test_subsets_hold_what_they_say() -> None:
    plain = scenes(300, subset="compositional")
    assert {scene.kind for scene in plain} == {"objects", "counts", "pairs", "relations"}
    assert all(scene.style == "filled" and scene.tone == "normal" for scene in plain)
    assert all(scene.style != "filled" and scene.tone == "normal" for scene in scenes(100, subset="styles"))
    assert all(scene.style == "filled" and scene.tone != "normal" for scene in scenes(100, subset="tones"))
    assert all(scene.kind == "words" for scene in scenes(50, "test", "words"))
    with pytest.raises(ValueError, match="no playground subset 'faces'"):
        sample_scene(np.random.default_rng(0), "train", "faces")
    with pytest.raises(ValueError, match="no playground split 'dev'"):
        sample_scene(np.random.default_rng(0), "dev")


def test_prompt_sets_are_fixed_distinct_and_of_their_split() -> None:
    heads = prompt_set("heads", "test")
    assert heads == prompt_set("heads", "test") and len(set(heads)) == len(heads)
    assert all(parse(text).split() == "test" and parse(text).kind == "heads" for text in heads)
    heads.clear()
    assert len(prompt_set("heads", "test")) > 20
    everything = prompt_set("all", "validation")
    assert len(everything) == grammar.SET_LIMIT
    # Shuffled: the start of the set already has all kinds.
    assert {parse(text).kind for text in everything[:60]} == set(grammar.KINDS)


def test_vocabulary_covers_every_prompt_and_words_stay_spelled() -> None:
    known = set(grammar.vocabulary())
    for scene in scenes(3000):
        said = re.findall(r"\w+|[^\w\s]", scene.text())
        assert set(said) - {scene.word} <= known
    assert not set(grammar.WORDS) & known
    assert set("".join(grammar.WORDS)) <= set(grammar.LETTERS)
    assert len(grammar.WORDS) == len(set(grammar.WORDS)) > 300
    assert clashes(known, grammar.WORDS) == []


def test_things_of_a_pair_never_share_a_colour() -> None:
    for subset in ("pairs", "relations"):
        assert all(scene.things[0].color != scene.things[1].color for scene in scenes(500, subset=subset))


def test_a_careless_caption_is_wrong_as_often_as_asked_and_stays_in_the_world() -> None:
    rng = np.random.default_rng(0)
    wrong = stated = 0
    for scene in scenes(2000):
        told = misdescribe(scene, rng, 0.25)
        assert parse(told.text()) == told and told.split() == scene.split()
        assert told.kind == scene.kind and told.word == scene.word
        pairs = list(zip(facts(scene), facts(told), strict=True))  # the same claims, some of them false
        assert all(true.name == claim.name for true, claim in pairs)
        wrong += sum(true.wanted != claim.wanted for true, claim in pairs)
        stated += len(pairs)
    # Captions of other splits are drawn again, and those are wrong more often than the rest.
    assert 0.2 < wrong / stated < 0.26


def test_a_careful_caption_is_the_prompt() -> None:
    rng = np.random.default_rng(0)
    assert all(misdescribe(scene, rng, 0.0) == scene for scene in scenes(200))
