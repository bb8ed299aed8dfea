"""The playground's drawings: exact pixels where they are decidable, reproducible everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import ndimage

from diffrl.playground import grammar
from diffrl.playground.grammar import parse, sample_scene
from diffrl.playground.renderer import GROUNDS, JITTER, PALETTE, SIZE, outline, render, toned


def test_the_seed_decides_every_pixel() -> None:
    for kind in grammar.KINDS:
        scene = sample_scene(np.random.default_rng(3), "train", kind)
        first, again, other = (render(scene, np.random.default_rng(seed)) for seed in (1, 1, 2))
        assert first.shape == (SIZE, SIZE, 3) and first.dtype == np.uint8
        assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("tone", grammar.TONES)
@pytest.mark.parametrize("color", grammar.COLORS)
def test_colours_are_those_of_the_palette(color: str, tone: str) -> None:
    text = f"{'an' if color == 'orange' else 'a'} {color} square on gray" + ("" if tone == "normal" else f", {tone}")
    image = render(parse(text), np.random.default_rng(0)).astype(int)
    ground = np.abs(image - np.round(toned(GROUNDS["gray"], tone))).max(-1) <= JITTER + 1
    thing = np.abs(image - np.round(toned(PALETTE[color], tone))).max(-1) <= JITTER + 1
    assert 700 < thing.sum() < 1600
    # All but the edge is one or the other.
    assert (ground | thing).mean() > 0.94
    assert ground[0].all() and ground[-1].all() and ground[:, 0].all() and ground[:, -1].all()


def test_every_colour_can_be_told_from_every_other_in_every_tone() -> None:
    shown = {(tone, color): np.array(toned(PALETTE[color], tone)) for tone in grammar.TONES for color in PALETTE}
    for first, second in itertools.combinations(shown, 2):
        assert np.linalg.norm(shown[first] - shown[second]) > 45, (first, second)
    for (tone, color), value in shown.items():
        for ground in GROUNDS.values():
            assert np.linalg.norm(value - np.array(toned(ground, tone))) > 50, (tone, color)


@pytest.mark.parametrize("number", ["two", "three", "four"])
def test_counted_things_do_not_touch(number: str) -> None:
    rng = np.random.default_rng(4)
    for shape in ("circles", "stars", "squares"):
        for _ in range(20):
            image = render(parse(f"{number} red {shape} on white"), rng).astype(int)
            things, count = ndimage.label(image[..., 1] < 235, structure=np.ones((3, 3)))
            assert count == grammar.NUMBERS[number]
            gap = ndimage.distance_transform_edt(things != 1)[things > 1].min()
            assert gap >= 2.0


@pytest.mark.parametrize("relation", grammar.RELATIONS)
def test_relations_hold_in_the_picture(relation: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        image = render(parse(f"a red circle {relation} a blue star on white"), rng).astype(int)
        red, blue = image[..., 2] < 130, image[..., 0] < 130
        (ry, rx), (by, bx) = (np.argwhere(mask).mean(0) for mask in (red & ~blue, blue & ~red))
        ahead = {"left of": bx - rx, "right of": rx - bx, "above": by - ry, "below": ry - by}[relation]
        assert ahead > 15


def test_words_are_large_and_inside() -> None:
    rng = np.random.default_rng(6)
    for word in grammar.WORDS[::4]:
        image = render(parse(f'the word "{word}" in blue on white'), rng)
        ink = image[..., 0] < 150
        rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
        assert columns[0] >= 1 and columns[-1] <= 62 and rows[0] >= 2 and rows[-1] <= 61
        assert 16 <= rows[-1] - rows[0] + 1 <= 28
        assert columns[-1] - columns[0] > 36


def test_styles_ink_less_than_filled() -> None:
    def ink(style: str) -> float:
        image = render(parse("a red square on white" + style), np.random.default_rng(8)).astype(int)
        return float((image[..., 1] < 140).sum())

    filled = ink("")
    assert ink(", outlined") < 0.5 * filled
    assert 0.45 * filled < ink(", striped") < 0.75 * filled
    assert 0.55 * filled < ink(", dotted") < 0.85 * filled


def test_shapes_are_about_equally_large() -> None:
    for shape in grammar.SHAPES:
        points = outline(shape)
        assert np.hypot(*points.T).max() < 1.6 and np.abs(points[:, 0]).max() <= 1.15
        x, y = points.T
        area = 0.5 * abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1)))
        assert 1.7 < area < 3.3, shape
