"""The playground's scenes hold what the prompt says, and what it leaves free has the distribution that is told."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from diffrl_playground import grammar
from diffrl_playground.grammar import Caption, parse
from diffrl_playground.scenes import EDGE, REACH, SIZE, complete, free, quarter_of, sample_caption


def test_a_scene_holds_what_its_prompt_says() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        caption = sample_caption(rng, "train")
        scene = complete(caption, rng)
        assert caption.attributes.items() <= scene.facts.items()
        assert scene.describe(tuple(caption.attributes)) == caption
        for name, values in free(caption).items():
            assert scene[name] in values and name not in caption.attributes


@pytest.mark.parametrize(
    "prompt",
    [
        "a heart",
        "a blue shape, striped",
        "two stars",
        "three red shapes on black",
        "four hearts",
        "a star and a heart",
        "a red circle left of a star",
        'the word "lex"',
        "a smiling head with no hat",
    ],
)
def test_free_facts_have_the_distribution_that_is_told(prompt: str) -> None:
    caption = parse(prompt)
    rng = np.random.default_rng(1)
    scenes = [complete(caption, rng) for _ in range(1000)]
    assert free(caption)
    for name, values in free(caption).items():
        assert len(values) > 1
        seen = Counter(scene[name] for scene in scenes)
        assert set(seen) <= set(values)
        for value in values:
            assert seen[value] / 1000 == pytest.approx(1 / len(values), abs=0.06), (name, value)


def test_what_is_free_is_named() -> None:
    def names(prompt: str) -> set[str]:
        return set(free(parse(prompt)))

    assert names("a heart") == {"color", "background", "style", "tone", "position", "size"}
    assert names("two red stars on white") == {"style", "tone", "layout"}
    assert names("four red stars on white, filled, dark") == set()
    assert names("a star and a heart") == {"color/1", "color/2", "background", "style", "tone", "relation"}
    assert names("a red star above a heart") == {"color/2", "background", "style", "tone"}
    assert names('the word "lex" in red') == {"background", "position"}
    assert names("a tan head") == {"hair", "mood", "glasses", "hat", "background"}


def test_a_free_colour_beside_a_said_one_is_another() -> None:
    values = free(parse("a red circle left of a star"))["color/2"]
    assert "red" not in values and len(values) == len(grammar.COLORS) - 1


def test_things_are_inside_and_apart() -> None:
    rng = np.random.default_rng(2)
    for kind in grammar.SHAPED:
        for _ in range(300):
            scene = complete(Caption(kind), rng)
            places = np.array(scene.places)
            reach = REACH * places[:, 2]
            assert (places[:, :2].min(1) - reach >= EDGE - 0.01).all()
            assert (places[:, :2].max(1) + reach <= SIZE - EDGE + 0.01).all()
            for i in range(len(places)):
                for j in range(i):
                    assert np.abs(places[i, :2] - places[j, :2]).max() > reach[i] + reach[j]


def test_bins_say_where_things_are() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        scene = complete(parse("three stars"), rng)
        assert scene["layout"] == " + ".join(sorted({quarter_of(x, y) for x, y, _ in scene.places}, key=_order))
        thing = complete(parse("a star"), rng)
        x, y, radius = thing.places[0]
        assert thing["position"] == quarter_of(x, y) and thing["size"] == ("large" if radius >= 17.5 else "small")


def _order(quarter: str) -> int:
    return ("upper left", "upper right", "lower left", "lower right").index(quarter)
