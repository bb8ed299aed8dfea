"""Names a part of the picture: its shape by the contour, its style by the paint inside, its colour by shares of pixels.

A shape is told by its radial profile: the distance of the outline from the middle in 48 directions, over its root mean
square. Profiles of rendered shapes, turned by up to 12 degrees, sharp and blurred, are the bank it is compared with.
Regular polygons come close to a circle, so a circle must not have their harmonics either.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import ndimage

from . import masks
from .grammar import COLORS, SHAPES, STYLES, TONES
from .renderer import BAR, LINE, PALETTE, RIM, SCALE, outline, stamp, toned
from .scenes import SIZE
from .sight import Box, Part, View

MOST_THINGS = 8
ANGLES = 48
MAX_MISS = 0.085  # root mean square between two profiles, from which on a shape is no longer that shape
MAX_HARMONIC = 0.02  # of a circle's profile, per harmonic from the fifth to the ninth
MIN_STYLE = 0.4  # share of the paint's variance that the style explains
MIN_PURE = 0.75  # share of a thing's pixels that must have one colour
_REACH = 95.0  # grey levels: farther from every colour of the world is no colour of it
_PAD = 4
_TURNS = tuple(range(-12, 13, 3))
_RADII = (9.0, 10.5, 12.0, 15.0, 19.0)
_NAMES = tuple((color, tone) for tone in TONES for color in COLORS)
_TABLE = np.array([toned(PALETTE[color], tone) for color, tone in _NAMES], np.float32)


@dataclass(frozen=True)
class Thing:
    """A part as the verifier reads it.

    `misses` (5,): how far its profile is from each of SHAPES. `styles` (3,): how much of its paint each of STYLES
    explains, up to 1. `colors` (6, 3): share of its pixels that have a colour (COLORS) in a tone (TONES). `mean`: RGB.
    `radius` in pixels, as the renderer takes it.
    """

    box: Box
    x: float
    y: float
    radius: float
    misses: np.ndarray
    styles: np.ndarray
    colors: np.ndarray
    mean: np.ndarray
    round_enough: bool

    @functools.cached_property
    def shape(self) -> str | None:
        """Its shape, or None if it is none of the world's."""
        best = int(self.misses.argmin())
        if self.misses[best] > MAX_MISS or (SHAPES[best] == "circle" and not self.round_enough):
            return None
        return SHAPES[best]

    @functools.cached_property
    def style(self) -> str | None:
        """Its style, or None if its inside looks like none of them."""
        best = int(self.styles.argmax())
        return STYLES[best] if self.styles[best] > MIN_STYLE else None

    @functools.cached_property
    def color(self) -> str | None:
        """The colour of nearly all of its pixels, in whatever tone, or None."""
        shares = self.colors.sum(1)
        return COLORS[int(shares.argmax())] if shares.max() >= MIN_PURE else None

    @functools.cached_property
    def tone(self) -> str | None:
        """The tone of its colour, or None where it has no single colour."""
        return None if self.color is None else TONES[int(self.colors[COLORS.index(self.color)].argmax())]

    @property
    def named(self) -> bool:
        """Whether a person would know it for a thing of the world: one of its shapes, in a style, of one colour."""
        return self.shape is not None and self.style is not None and self.color is not None


def look(views: Sequence[View]) -> list[list[Thing]]:
    """The largest parts of each picture, at most MOST_THINGS, measured all at once: each as alone, to the bit."""
    seen = [(view, part) for view in views for part in view.parts[:MOST_THINGS]]
    if not seen:
        return [[] for _ in views]
    members = np.zeros((len(seen), SIZE, SIZE), bool)
    for member, (_, part) in zip(members, seen, strict=True):
        member[part.place] = part.member
    words = masks.pack(members)
    near = masks.unpack(masks.dilated(masks.dilated(words)))
    inner, core = masks.unpack(masks.eroded(words)), masks.unpack(masks.eroded(masks.filled(words)))
    distances = np.stack([view.distance for view, _ in seen])
    full = [max(_high(distance[member]), 1.0) for distance, member in zip(distances, members, strict=True)]
    alpha = np.where(near, distances, 0.0) / np.array(full, np.float32)[:, None, None]
    alpha = np.clip(alpha, 0.0, 1.0)
    soft = np.where(core, np.float32(1.0), alpha)
    things = map(_look, seen, members, inner, alpha, soft)
    return [list(itertools.islice(things, len(view.parts[:MOST_THINGS]))) for view in views]


def _high(values: np.ndarray) -> float:
    """The 0.9 quantile of float32 values, as np.quantile has it, which takes ten times as long."""
    place = 0.9 * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    values.partition((below, above))
    low, high, weight = values[below], values[above], place - below
    step = high - low
    return float(high - step * np.float32(1.0 - weight) if weight >= 0.5 else low + step * np.float32(weight))


def _look(seen: tuple[View, Part], member: np.ndarray, inner: np.ndarray, alpha: np.ndarray, soft: np.ndarray) -> Thing:
    """Measures one part by its masks (64, 64): `member`, that without its rim, its paint, and that with its inside."""
    view, part = seen
    rows, columns = part.place
    top, left = max(rows.start - _PAD, 0), max(columns.start - _PAD, 0)
    crop = (slice(top, rows.stop + _PAD), slice(left, columns.stop + _PAD))
    soft, alpha = np.ascontiguousarray(soft[crop]), np.ascontiguousarray(alpha[crop])
    weight = soft.sum()
    x = float((soft * _PLACES[: soft.shape[1]]).sum() / weight)
    y = float((soft * _PLACES[: soft.shape[0], None]).sum() / weight)
    profile, scale, reach = _profile(soft, x, y)
    misses, match = _compare(profile, scale)
    middle = _middle(*match)
    reach += math.hypot(*middle)
    colors, mean = _colors(view, crop, member[crop], inner[crop], alpha)
    return Thing(
        box=part.box,
        x=left + x + 0.5 - middle[0],
        y=top + y + 0.5 - middle[1],
        radius=match[2],
        misses=misses,
        styles=_styles(alpha, soft, (x - middle[0], y - middle[1]), match, reach),
        colors=colors,
        mean=mean,
        round_enough=_round(profile),
    )


_PLACES = np.arange(SIZE)


@functools.cache
def _rays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    steps = np.arange(0.0, 40.0, 0.5)
    angle = 2 * np.pi * np.arange(ANGLES) / ANGLES
    return np.cos(angle)[:, None] * steps, np.sin(angle)[:, None] * steps, steps


def _profile(soft: np.ndarray, x: float, y: float) -> tuple[np.ndarray, float, float]:
    """`(profile (48,), scale, reach)`: the outline's distance from (x, y) in 48 directions, over its root mean square;
    and how far away the mask ends.

    `soft` (h, w) in [0, 1]. The distance is the integral of the mask along the ray, which a blur does not move.
    """
    across, down, steps = _rays()
    height, width = soft.shape
    apart = np.square(_PLACES[:width] - x) + np.square(_PLACES[:height, None] - y)
    # Where all is 1, or all 0, within a pixel of a place, no one has to look: the value there is that.
    reach = math.sqrt(float(apart[soft > 0].max(initial=0.0)))
    solid = min(math.sqrt(float(apart[soft < 1].min(initial=1e4))), x, y, width - 1 - x, height - 1 - y)
    number = int(np.searchsorted(steps, np.hypot(height, width)))
    first, last = min(max(int(2 * (solid - 1.5)), 0), number), min(int(2 * (reach + 1.5)) + 2, number)
    values = np.zeros((ANGLES, number), soft.dtype)
    values[:, :first] = 1.0
    places = [y + down[:, first:last], x + across[:, first:last]]
    values[:, first:last] = ndimage.map_coordinates(soft, places, order=1)
    lengths = values.sum(1) * 0.5 - 0.25
    scale = float(np.sqrt(np.square(lengths).mean()))
    return lengths / max(scale, 1e-3), scale, reach


@functools.cache
def _bank() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Profiles (M, 48), and of each: its shape's number, its turn in degrees, its radius, its scale (M, 4)."""
    profiles, labels = [], []
    for number, shape in enumerate(SHAPES):
        for radius in _RADII:
            mask = _soft(stamp(shape, 32, 32, radius))
            for turn in _TURNS if shape != "circle" else (0,):
                turned = ndimage.rotate(mask, turn, reshape=False, order=1) if turn else mask
                for blur in (_BLUR_SEEN, 1.6):
                    soft = ndimage.gaussian_filter(turned, blur)
                    grid_y, grid_x = np.mgrid[:SIZE, :SIZE]
                    x, y = (soft * grid_x).sum() / soft.sum(), (soft * grid_y).sum() / soft.sum()
                    profile, scale, _ = _profile(soft, x, y)
                    profiles.append(profile)
                    labels.append((number, turn, radius, scale))
    table = np.array(labels)
    return np.stack(profiles), table[:, 0].astype(int), table[:, 1], table[:, 2:]


_BLUR_SEEN = 0.7  # the view's own


Match = tuple[str, float, float]  # the nearest shape, its turn (degrees) and radius (pixels)


def _compare(profile: np.ndarray, scale: float) -> tuple[np.ndarray, Match]:
    """Least distance from each shape (5,), and the match."""
    profiles, numbers, turns, sizes = _bank()  # in the order of SHAPES
    miss = np.sqrt(np.square(profiles - profile).mean(1))
    miss = miss + 0.02 * np.abs(np.log(max(scale, 1.0) / sizes[:, 1]))  # a profile of about its own size
    misses = np.minimum.reduceat(miss, np.searchsorted(numbers, range(len(SHAPES))))
    best = int(miss.argmin())
    return misses, (SHAPES[numbers[best]], float(turns[best]), float(sizes[best, 0] * scale / sizes[best, 1]))


def _round(profile: np.ndarray) -> bool:
    """Whether no harmonic of the profile betrays a regular polygon of five to nine corners."""
    harmonics = np.abs(np.fft.rfft(profile)[5:10]) * 2 / ANGLES
    return bool(harmonics.max() < MAX_HARMONIC)


@functools.cache
def _centroid(shape: str) -> tuple[float, float]:
    """The centre of mass of a shape of radius 1, from the middle that the renderer gives it."""
    points = outline(shape)
    x, y = points.T
    nx, ny = np.roll(x, -1), np.roll(y, -1)
    cross = x * ny - nx * y
    return float(((x + nx) * cross).sum() / (3 * cross.sum())), float(((y + ny) * cross).sum() / (3 * cross.sum()))


def _middle(shape: str, turn: float, radius: float) -> tuple[float, float]:
    """Where the centre of mass lies from the renderer's middle, in pixels."""
    x, y = _centroid(shape)
    angle = -np.radians(turn)
    return radius * float(x * np.cos(angle) - y * np.sin(angle)), radius * float(x * np.sin(angle) + y * np.cos(angle))


_HALF = 28  # half the side of the square on which paint is compared


@functools.lru_cache(maxsize=512)
def _patterns(shape: str, radius: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The paint of each style on the square's places: filled and outlined (n,), stripes with all places of the bars
    (n, k)."""
    size = 2 * _HALF + 1
    middle = (_HALF + 0.5, _HALF + 0.5, radius)
    filled, hollow, rim = (_soft(stamp(shape, *middle, line, size)) for line in (0.0, LINE, RIM))
    rows = np.arange(size)[:, None]
    bars = [np.maximum(rim, filled * (((rows + phase) // BAR) % 2 == 0)) for phase in range(2 * BAR)]
    full, line, *stripes = (ndimage.gaussian_filter(p, _BLUR_SEEN).ravel() for p in (filled, hollow, *bars))
    return full, line, np.stack(stripes, axis=1)


def _soft(mask: Image.Image) -> np.ndarray:
    """A mask that was drawn large, in [0, 1]."""
    return np.asarray(mask.reduce(SCALE), np.float32) / 255.0


def _styles(alpha: np.ndarray, soft: np.ndarray, middle: tuple[float, float], match: Match, reach: float) -> np.ndarray:
    """How well each of STYLES explains the paint inside the outline, (3,): 1 for exactly, 0 from a mean squared error
    of 0.12 on; the stripes may lie anywhere, and those of a circle at any of its turns. The paint ends at `reach`.
    """
    shape, turn, radius = match
    patterns = _patterns(shape, round(2 * min(max(radius, 4.0), 24.0)) / 2)
    scores, solid = np.zeros(len(STYLES)), (soft > 0.5).astype(np.float32)
    for angle in (turn,) if shape != "circle" else (0.0, -10.0, 10.0):
        places, number = _disc(middle, angle, min(math.ceil(reach) + 2, _HALF))
        inside = np.flatnonzero(ndimage.map_coordinates(solid, places, order=1) > 0.5)
        paint = ndimage.map_coordinates(alpha, places[:, inside], order=1)
        number = number[inside]
        for i, pattern in enumerate(patterns):
            errors = pattern[number].T - paint
            scores[i] = max(scores[i], 1.0 - float(np.square(errors).mean(-1).min() if len(paint) else 1.0) / 0.12)
        if scores.max() > 0.75:
            break
    return scores


@functools.cache
def _within(radius: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of the large square that lie at most `radius` from its middle along a side and aslant."""
    side = np.arange(-radius, radius + 1)
    near = np.hypot(side[:, None], side) <= (radius if radius < _HALF else 2 * _HALF)
    rows, columns = np.nonzero(near)
    return rows + _HALF - radius, columns + _HALF - radius


@functools.cache
def _turned(degrees: float) -> tuple[np.ndarray, np.ndarray]:
    """A turn by an angle as a matrix, and where it moves the large square's middle."""
    angle = np.radians(-degrees)
    matrix = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return matrix, matrix @ np.array([_HALF, _HALF])


def _disc(middle: tuple[float, float], degrees: float, radius: int) -> tuple[np.ndarray, np.ndarray]:
    """Where in a mask the places of a disc lie (2, n) whose middle is `middle` (x, y) and that is turned by an angle,
    and their numbers in the large square; with the largest radius it is all of the square.
    """
    rows, columns = _within(radius)
    matrix, moved = _turned(degrees)
    places = [rows * matrix[i, 0] + columns * matrix[i, 1] + (middle[1 - i] - moved[i]) for i in (0, 1)]
    return np.stack(places), rows * (2 * _HALF + 1) + columns


def _colors(
    view: View, crop: tuple[slice, slice], member: np.ndarray, inner: np.ndarray, alpha: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shares of the painted pixels that have each colour in each tone (6, 3), and their mean RGB."""
    core = member & (alpha > 0.9)
    chosen = core & inner
    number, painted = int(np.count_nonzero(chosen)), int(np.count_nonzero(core))
    if number < 0.3 * painted or number < 6:
        chosen = core if painted else member
    # Uneven light on the ground lies on the things, too.
    pixels = view.raw[crop][chosen] * ((view.ground + 20.0) / (view.surface[crop][chosen] + 20.0))
    red, green, blue = (np.square(one - color[:, None]) for one, color in zip(pixels.T.copy(), _TABLE.T, strict=True))
    red += green
    red += blue
    apart = np.sqrt(red, out=red)
    nearest = np.where(apart.min(0) < _REACH, apart.argmin(0), len(_TABLE))
    shares = np.bincount(nearest, minlength=len(_TABLE) + 1)[:-1] / len(pixels)
    return shares.reshape(len(TONES), len(COLORS)).T, pixels.mean(0)
