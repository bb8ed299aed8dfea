"""The playground's language: what prompts say and leave free, facts, splits."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from diffrl_playground import grammar
from diffrl_playground.grammar import Caption, facts, misdescribe, parse, possible
from diffrl_playground.scenes import SET_LIMIT, prompt_set, sample_caption
from scripts.playground.tokenizer import clashes, vocabulary


def captions(count: int, split: str = "train", subset: str = "all") -> list[Caption]:
    rng = np.random.default_rng(7)
    return [sample_caption(rng, split, subset) for _ in range(count)]


def tokens(text: str) -> int:
    """CLIP-style: a token per word, mark and quoted letter, and the begin and end tokens."""
    quoted = sum(len(word) - 1 for word in re.findall(r'"(\w+)"', text))
    return len(re.findall(r"\w+|[^\w\s]", text)) + quoted + 2


PAIR = {"shape/1": "circle", "color/1": "red", "shape/2": "square"}


@pytest.mark.parametrize(
    ("caption", "text"),
    [
        (Caption("objects", {"shape": "heart"}), "a heart"),
        (Caption("objects", {"shape": "circle", "color": "red", "background": "white"}), "a red circle on white"),
        (Caption("objects", {"color": "blue", "style": "striped"}), "a blue shape, striped"),
        (Caption("counts", {"count": "2", "shape": "star"}), "two stars"),
        (Caption("counts", {"count": "3", "color": "red", "background": "black"}), "three red shapes on black"),
        (Caption("pairs", PAIR | {"tone": "pale"}), "a red circle and a square, pale"),
        (Caption("relations", PAIR | {"relation": "left of"}), "a red circle left of a square"),
        (Caption("words", {"word": "lex"}), 'the word "lex"'),
        (Caption("words", {"word": "lex", "color": "red"}), 'the word "lex" in red'),
        (Caption("heads", {"mood": "smiling"}), "a smiling head"),
        (Caption("heads", {"hat": "yes"}), "a head with a hat"),
        (Caption("heads", {"skin": "tan", "glasses": "no", "hat": "no"}), "a tan head with no glasses and no hat"),
        (
            Caption("heads", {"skin": "tan", "hair": "red", "glasses": "yes", "hat": "no", "background": "white"}),
            "a tan head with red hair, glasses and no hat on white",
        ),
    ],
)
def test_text_and_parse_are_inverse(caption: Caption, text: str) -> None:
    assert caption.text() == text
    assert parse(text) == caption


def test_every_sampled_caption_parses_back_and_fits_16_tokens() -> None:
    for caption in captions(1000):
        assert parse(caption.text()) == caption
        assert tokens(caption.text()) <= 16, caption.text()


@pytest.mark.parametrize(
    "text",
    [
        "a shape",
        "two shapes on white",
        "an orange circle on white",
        "five red circles on white",
        "a red circle on white, dark, striped",
        "a red circle and a red square",
        "a red circle left of a blue circle",
        'the word "kup" in red on white, dark',
        'the word "zzz"',
        "a smiling tan head with red hair glasses on white",
        "a smiling tan head with red hair, glasses and a hat",
        "a cat",
        "",
    ],
)
def test_other_prompts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a prompt of the playground"):
        parse(text)


def test_facts_are_what_is_said_and_nothing_else() -> None:
    def named(text: str) -> list[tuple[str, str]]:
        return list(facts(parse(text)).items())

    assert named("a heart") == [("shape", "heart")]
    assert named("three red shapes on black, dark") == [
        ("count", "3"),
        ("color", "red"),
        ("background", "black"),
        ("tone", "dark"),
    ]
    assert named("a circle left of a blue star") == [
        ("shape/1", "circle"),
        ("shape/2", "star"),
        ("color/2", "blue"),
        ("relation", "left of"),
    ]
    assert [name for name, _ in named("a circle and a blue star")] == ["shape/1", "shape/2", "color/2"]
    assert named('the word "lex" on white') == [("word", "lex"), ("background", "white")]
    assert named("a head with red hair and no hat") == [("hair", "red"), ("hat", "no")]


def test_splits_share_no_composition_and_no_word() -> None:
    content = {split: {caption.content() for caption in captions(500, split)} for split in grammar.SPLITS}
    assert not content["train"] & content["test"]
    assert not content["train"] & content["validation"]
    assert not content["test"] & content["validation"]
    tenths = Counter(grammar._split_of(f"{word}") for word in (f"word {i}" for i in range(4000)))
    assert 0.76 < tenths["train"] / 4000 < 0.84 and 0.07 < tenths["test"] / 4000 < 0.13


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a red circle left of a blue star", "a blue star right of a red circle"),
        ("a heart above a star on white", "a star below a heart on white"),
        ("a circle and a blue star", "a blue star and a circle"),
        ("a red circle on white", "a red circle on white, striped, dark"),
        ('the word "lex" in red', 'the word "lex" on black'),
    ],
)
def test_other_words_for_the_same_are_of_the_same_split(one: str, other: str) -> None:
    assert parse(one).content() == parse(other).content()


def test_what_is_said_does_not_depend_on_the_values() -> None:
    """Else what a prompt leaves free would not have the world's distribution."""
    rng = np.random.default_rng(0)
    hats = [names for names in (grammar.stated_names("heads", rng) for _ in range(4000)) if "hat" in names]
    assert 0.4 < len(hats) / 4000 < 0.6
    said = Counter(c.attributes["hat"] for c in captions(1500, "train", "heads") if "hat" in c.attributes)
    assert 0.42 < said["yes"] / sum(said.values()) < 0.58


def test_prompt_sets_are_distinct_stable_and_of_their_split() -> None:
    for subset in ("objects", "words", "heads", "tones"):
        prompts = prompt_set(subset, "test")
        assert len(prompts) == len(set(prompts)) and len(prompts) >= 100, subset
        assert prompts == prompt_set(subset, "test")
        assert all(parse(prompt).split() == "test" for prompt in prompts[:300])
    assert all("style" in parse(prompt).attributes for prompt in prompt_set("styles", "train"))
    assert all("tone" in parse(prompt).attributes for prompt in prompt_set("tones", "test"))
    assert len(prompt_set("compositional", "train")) == SET_LIMIT
    kinds = {parse(prompt).kind for prompt in prompt_set("compositional", "train")}
    assert kinds == {"objects", "counts", "pairs", "relations"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no playground subset 'cats'"):
        prompt_set("cats", "train")
    with pytest.raises(ValueError, match="no playground split 'dev'"):
        prompt_set("all", "dev")


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_careless_captions_say_the_same_facts_and_tell_them_wrongly(share: float) -> None:
    rng = np.random.default_rng(3)
    wrong: list[bool] = []
    for caption in captions(500):
        told = misdescribe(caption, rng, share)
        assert told.attributes.keys() == caption.attributes.keys() and possible(told)
        assert told.split() == caption.split() or share == 1.0
        assert told.attributes.get("word") == caption.attributes.get("word")
        wrong += [told.attributes[name] != value for name, value in caption.attributes.items() if name != "word"]
    if share in (0.0, 1.0):
        assert set(wrong) == {bool(share)}
    else:
        assert share - 0.04 < sum(wrong) / len(wrong) < share + 0.04


def test_words_can_be_spelled() -> None:
    assert len(grammar.WORDS) > 80 and not clashes(vocabulary(), grammar.WORDS)
    assert set("".join(grammar.WORDS)) == set(grammar.LETTERS)
