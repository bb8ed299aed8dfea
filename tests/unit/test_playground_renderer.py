"""The playground's drawings: exact pixels where they are decidable, reproducible everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import ndimage

from diffrl_playground import grammar
from diffrl_playground.grammar import Caption, parse
from diffrl_playground.renderer import GROUNDS, HAT, PALETTE, SKIN, draw, outline, render, toned
from diffrl_playground.scenes import SIZE, complete


def test_the_scene_decides_every_pixel() -> None:
    for kind in grammar.KINDS:
        first, other = (complete(Caption(kind), np.random.default_rng(seed)) for seed in (1, 2))
        image = render(first)
        assert image.shape == (SIZE, SIZE, 3) and image.dtype == np.uint8
        assert np.array_equal(image, render(first)) and not np.array_equal(image, render(other))
        text = first.describe(("shape", "count", "shape/1", "shape/2", "relation", "word", "mood")).text()
        rng = np.random.default_rng(5)
        assert np.array_equal(draw(text, rng), render(complete(parse(text), np.random.default_rng(5))))


@pytest.mark.parametrize("tone", grammar.TONES)
@pytest.mark.parametrize("color", grammar.COLORS)
def test_colours_are_those_of_the_palette(color: str, tone: str) -> None:
    image = draw(f"a {color} square on gray, filled, {tone}", np.random.default_rng(0)).astype(int)
    ground = (image == GROUNDS["gray"]).all(-1)
    thing = (image == toned(PALETTE[color], tone)).all(-1)
    assert 500 < thing.sum() < 1600
    # All but the edge is one or the other.
    assert (ground | thing).mean() > 0.94
    assert ground[0].all() and ground[-1].all() and ground[:, 0].all() and ground[:, -1].all()


def test_every_colour_can_be_told_from_every_other_in_every_tone_and_from_every_ground() -> None:
    shown = {(tone, color): np.array(toned(PALETTE[color], tone)) for tone in grammar.TONES for color in PALETTE}
    for first, second in itertools.combinations(shown, 2):
        assert np.linalg.norm(shown[first] - shown[second]) > 60, (first, second)
    for name, value in shown.items():
        for ground in GROUNDS.values():
            assert np.linalg.norm(value - np.array(ground)) > 70, name
    for first, second in itertools.combinations(np.array([*SKIN.values(), HAT]), 2):
        assert np.linalg.norm(first - second) > 75


@pytest.mark.parametrize("number", ["two", "three", "four"])
def test_counted_things_do_not_touch(number: str) -> None:
    rng = np.random.default_rng(4)
    for shape in grammar.SHAPES:
        for _ in range(10):
            image = draw(f"{number} red {shape}s on white, filled, plain", rng).astype(int)
            things, count = ndimage.label(image[..., 1] < 235, structure=np.ones((3, 3)))
            assert count == grammar.NUMBERS[number]
            assert ndimage.distance_transform_edt(things != 1)[things > 1].min() >= 2.0


@pytest.mark.parametrize("relation", grammar.RELATIONS)
def test_relations_hold_in_the_picture(relation: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        image = draw(f"a red circle {relation} a blue star on white, filled, plain", rng).astype(int)
        red, blue = image[..., 2] < 130, image[..., 0] < 130
        (ry, rx), (by, bx) = (np.argwhere(mask).mean(0) for mask in (red & ~blue, blue & ~red))
        assert {"left of": bx - rx, "right of": rx - bx, "above": by - ry, "below": ry - by}[relation] > 20


def test_words_are_large_and_inside() -> None:
    rng = np.random.default_rng(6)
    for word in grammar.WORDS[::4]:
        ink = draw(f'the word "{word}" in blue on white', rng)[..., 0] < 150
        rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
        assert columns[0] >= 1 and columns[-1] <= 62 and rows[0] >= 2 and rows[-1] <= 61
        assert 23 <= rows[-1] - rows[0] + 1 <= 26
        assert columns[-1] - columns[0] > 44


def test_styles_ink_less_than_filled() -> None:
    def ink(style: str) -> float:
        image = draw(f"a red square on white, {style}, plain", np.random.default_rng(8)).astype(int)
        return float((image[..., 1] < 140).sum())

    assert ink("outlined") < 0.55 * ink("filled")
    assert 0.5 * ink("filled") < ink("striped") < 0.8 * ink("filled")


def test_shapes_are_about_equally_large() -> None:
    for shape in grammar.SHAPES:
        points = outline(shape)
        assert np.hypot(*points.T).max() < 1.6 and np.abs(points).max() <= 1.15
        x, y = points.T
        area = 0.5 * abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1)))
        assert 1.6 < area < 3.3, shape
