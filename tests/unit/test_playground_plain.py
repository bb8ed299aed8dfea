"""The verifier looks at many pictures at once, and sees what plain code sees that takes one picture and one part."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from diffrl_playground import masks, things
from diffrl_playground.grammar import COLORS, KINDS, SHAPES, STYLES, TONES, Caption
from diffrl_playground.renderer import render
from diffrl_playground.scenes import complete, sample_caption
from diffrl_playground.sight import Part, View, views
from diffrl_playground.things import Thing
from diffrl_playground.verifier import MOST_THINGS, TILT, Observation, glance, judge, judged

sys.path.insert(0, str(Path(__file__).parents[1]))
from shaken import SHAKEN, shaken

EIGHT = np.ones((3, 3), bool)


def plain_view(image: np.ndarray) -> View:
    raw = image.astype(np.float32)
    pixels = ndimage.gaussian_filter(raw, (0.7, 0.7, 0))
    edge = np.ones((64, 64), bool)
    edge[2:-2, 2:-2] = False
    ring, flat = pixels[edge], pixels.reshape(-1, 3)
    y, x = np.mgrid[-1:1:64j, -1:1:64j]
    basis = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], -1).reshape(-1, 6)
    surface = np.broadcast_to(np.median(ring, axis=0), flat.shape).astype(np.float32)
    within = edge.ravel()
    for reach in (60.0, 25.0, 16.0):
        near = np.flatnonzero(within & (np.abs(flat - surface).max(1) < reach))
        if len(near) < 200:
            break
        index = near[:: max(len(near) // 500, 1)]
        surface = (basis @ np.linalg.lstsq(basis[index], flat[index], rcond=None)[0]).astype(np.float32)
        within = np.ones(len(flat), bool)
    surface = surface.reshape(pixels.shape)
    distance = np.sqrt(np.square(pixels - surface).sum(-1))
    alpha = distance / np.maximum(ndimage.maximum_filter(distance, size=7), 30.0)
    mask = np.pad((distance > 30.0) & (alpha > 0.45), 1)
    labels, _ = ndimage.label(ndimage.binary_closing(mask, EIGHT)[1:-1, 1:-1], structure=EIGHT)
    members = [(place, labels[place] == i) for i, place in enumerate(ndimage.find_objects(labels), start=1)]
    parts = [Part(place, member, int(member.sum())) for place, member in members if member.sum() >= 8]
    inked = np.zeros((64, 64), bool)
    for part in parts:
        inked[part.place] |= part.member
    inked = ndimage.binary_fill_holes(inked)
    faint = np.linalg.norm(ndimage.uniform_filter(raw - surface, (5, 5, 0)), axis=-1) > 14.0
    ghosts, count = ndimage.label(faint & ~ndimage.binary_dilation(inked, EIGHT, iterations=5), structure=EIGHT)
    return View(
        raw=raw,
        pixels=pixels,
        ground=np.quantile(surface[::4, ::4].reshape(-1, 3), 0.9, axis=0),
        surface=surface,
        cover=float((np.abs(ring - surface[edge]).max(1) < 32.0).mean()),
        distance=distance,
        parts=sorted(parts, key=lambda part: -part.area),
        inked=inked,
        ghosts=int((np.bincount(ghosts.ravel(), minlength=count + 1)[1:] >= 12).sum()),
    )


def plain_look(view: View, part: Part) -> Thing:
    rows, columns = part.place
    top, left, bottom, right = rows.start - 4, columns.start - 4, rows.stop + 4, columns.stop + 4
    crop = (slice(max(top, 0), min(bottom, 64)), slice(max(left, 0), min(right, 64)))
    whole = np.zeros((64, 64), bool)
    whole[part.place] = part.member
    member = whole[crop].copy()
    distance = np.where(ndimage.binary_dilation(member, iterations=2), view.distance[crop], 0.0)
    alpha = np.clip(distance / max(float(np.quantile(distance[member], 0.9)), 1.0), 0.0, 1.0)
    soft = np.where(ndimage.binary_erosion(ndimage.binary_fill_holes(member)), 1.0, alpha)
    grid_y, grid_x = np.mgrid[: soft.shape[0], : soft.shape[1]]
    x, y = float((soft * grid_x).sum() / soft.sum()), float((soft * grid_y).sum() / soft.sum())
    across, down, steps = things._rays()
    number = np.searchsorted(steps, np.hypot(*soft.shape))
    rays = ndimage.map_coordinates(soft, [y + down[:, :number], x + across[:, :number]], order=1, mode="constant")
    lengths = rays.sum(1) * 0.5 - 0.25
    scale = float(np.sqrt(np.square(lengths).mean()))
    profile = lengths / max(scale, 1e-3)

    profiles, numbers, turns, sizes = things._bank()
    miss = np.sqrt(np.square(profiles - profile).mean(1)) + 0.02 * np.abs(np.log(max(scale, 1.0) / sizes[:, 1]))
    best = int(miss.argmin())
    shape, turn, radius = SHAPES[numbers[best]], float(turns[best]), float(sizes[best, 0] * scale / sizes[best, 1])
    middle = things._middle(shape, turn, radius)

    core = member & (alpha > 0.9)
    inner = core & ndimage.binary_erosion(member)
    pixels = view.raw[crop] * ((view.ground + 20.0) / (view.surface[crop] + 20.0))
    chosen = pixels[inner if inner.sum() >= 0.3 * core.sum() and inner.sum() >= 6 else core if core.any() else member]
    apart = np.linalg.norm(chosen[:, None] - things._TABLE, axis=-1)
    nearest = np.where(apart.min(1) < 95.0, apart.argmin(1), 18)
    shares = np.bincount(nearest, minlength=19)[:-1] / len(chosen)
    return Thing(
        box=part.box,
        x=crop[1].start + x + 0.5 - middle[0],
        y=crop[0].start + y + 0.5 - middle[1],
        radius=radius,
        misses=np.array([miss[numbers == number].min() for number in range(len(SHAPES))]),
        styles=plain_styles(alpha, soft, (x - middle[0], y - middle[1]), radius, shape, turn),
        colors=shares.reshape(len(TONES), len(COLORS)).T,
        mean=chosen.mean(0),
        round_enough=bool((np.abs(np.fft.rfft(profile)[5:10]) * 2 / 48).max() < 0.02),
    )


def plain_styles(
    alpha: np.ndarray, soft: np.ndarray, middle: tuple[float, float], radius: float, shape: str, turn: float
) -> np.ndarray:
    patterns = [p.T.reshape(-1, 57, 57) for p in things._patterns(shape, round(2 * min(max(radius, 4.0), 24.0)) / 2)]
    scores = np.zeros(len(STYLES))
    for degrees in (turn,) if shape != "circle" else (0.0, -10.0, 10.0):
        angle = np.radians(-degrees)
        matrix = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        offset = np.array([middle[1], middle[0]]) - matrix @ np.array([28, 28])
        solid, paint = (
            ndimage.affine_transform(mask, matrix, offset, (57, 57), order=1)
            for mask in ((soft > 0.5).astype(np.float32), alpha)
        )
        inside = solid > 0.5
        for i, pattern in enumerate(patterns):
            errors = np.square(pattern[:, inside] - paint[inside]).mean(1) if inside.any() else np.ones(1)
            scores[i] = max(scores[i], 1.0 - float(errors.min()) / 0.12)
        if scores.max() > 0.75:
            break
    return scores


class Plain(Observation):
    def __init__(self, image: np.ndarray) -> None:
        super().__init__(image, plain_view(image))

    @functools.cached_property
    def things(self) -> list[Thing]:
        return [plain_look(self.view, part) for part in self.view.parts[:MOST_THINGS]]

    @functools.cached_property
    def _tilted(self) -> list[View]:
        ground = self.view.ground.astype(np.float32)
        turned = [ndimage.rotate(self.view.raw - ground, angle, reshape=False, order=1) for angle in (-TILT, TILT)]
        return [plain_view((one + ground).clip(0, 255)) for one in turned]


@pytest.fixture(scope="module")
def pictures() -> tuple[np.ndarray, list[Caption]]:
    """320 pictures: as drawn, with noise, as a camera changes them, blurred, nothing but smooth or sharp noise, and
    moved over the edge under another picture."""
    rng = np.random.default_rng(0)
    kinds = [*KINDS, "compositional", "styles", "tones"]
    captions = [sample_caption(rng, ("train", "test")[i % 2], kinds[i % len(kinds)]) for i in range(320)]
    images = []
    for i, caption in enumerate(captions):
        image = render(complete(caption, rng)).astype(np.float64)
        if i % 8 == 1:
            image += rng.choice([3, 6, 12, 25, 50]) * rng.standard_normal(image.shape)
        elif i % 8 == 2:
            image = shaken(image.astype(np.uint8), str(rng.choice(list(SHAKEN))), rng)
        elif i % 8 == 3:
            image = ndimage.gaussian_filter(image, (*[rng.uniform(0.3, 5)] * 2, 0))
        elif i % 8 in (4, 5):
            image = ndimage.gaussian_filter(rng.standard_normal(image.shape), (*[rng.uniform(0, 6)] * 2, 0))
            image = 255 * (image - image.min()) / np.ptp(image)
        elif i % 8 == 6:
            image = 0.7 * np.roll(image, rng.integers(-30, 30, 2), (0, 1)) + 0.3 * images[i - 5]
        images.append(image.clip(0, 255).astype(np.uint8))
    return np.stack(images), captions


# `np.quantile` of float32 numbers, which plain code calls, has another last bit in versions before.
as_of_numpy_2_4 = pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.4.0", reason="numpy's own quantile")


@as_of_numpy_2_4
def test_verdicts_are_those_of_plain_code_to_the_bit(pictures: tuple[np.ndarray, list[Caption]]) -> None:
    images, captions = pictures
    verdicts = judged(images, [caption.text() for caption in captions])
    assert verdicts == [judge(Plain(image), caption) for image, caption in zip(images, captions, strict=True)]
    assert 0.05 < np.mean([verdict.all_right for verdict in verdicts]) < 0.8  # right and wrong ones


@as_of_numpy_2_4
def test_what_is_measured_is_what_plain_code_measures_to_the_bit(pictures: tuple[np.ndarray, list[Caption]]) -> None:
    def same(found: object, wanted: object) -> None:
        for name, value in vars(wanted).items():
            if isinstance(value, np.ndarray):
                assert value.dtype == getattr(found, name).dtype and np.array_equal(value, getattr(found, name)), name
            elif name != "parts":
                assert value == getattr(found, name), name

    for image, view in zip(pictures[0][:160], views(pictures[0][:160]), strict=True):
        wanted = plain_view(image)
        same(view, wanted)
        assert len(view.parts) == len(wanted.parts)
        for part, other in zip(view.parts, wanted.parts, strict=True):
            same(part, other)
        for thing, part in zip(things.look([view])[0], wanted.parts, strict=False):
            same(thing, plain_look(view, part))


def test_an_image_in_a_batch_twice_or_seen_before_is_looked_at_once(pictures: tuple[np.ndarray, list[Caption]]) -> None:
    first, second, third = pictures[0][:3]
    one, two, again = glance(np.stack([first, second, first]))
    assert one is again and one is not two
    assert list(glance(np.stack([third, second])))[1] is two


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, None])
def test_morphology_by_words_is_that_of_scipy(share: float | None) -> None:
    rng = np.random.default_rng(1)
    noise = ndimage.gaussian_filter(rng.standard_normal((40, 64, 64)), (0, 2, 2)) if share is None else None
    drawn = noise > 0 if noise is not None else rng.random((40, 64, 64)) < share
    words = masks.pack(drawn)
    assert np.array_equal(masks.unpack(words), drawn)
    for found, wanted in (
        (masks.dilated, ndimage.binary_dilation),
        (masks.eroded, ndimage.binary_erosion),
        (masks.filled, ndimage.binary_fill_holes),
        (masks.closed, lambda mask: ndimage.binary_closing(np.pad(mask, 1), EIGHT)[1:-1, 1:-1]),
        (lambda word: masks.widened(word, 5), lambda mask: ndimage.binary_dilation(mask, EIGHT, iterations=5)),
    ):
        assert np.array_equal(masks.unpack(found(words)), np.stack([wanted(mask) for mask in drawn]))
