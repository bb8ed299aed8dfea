"""Names a part of the picture: its shape by the contour, its style by the paint inside, its colour by shares of pixels.

A shape is told by its radial profile: the distance of the outline from the middle in 48 directions, over its root mean
square. Profiles of rendered shapes, turned by up to 12 degrees, sharp and blurred, are the bank it is compared with.
Regular polygons come close to a circle, so a circle must not have their harmonics either.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from .grammar import COLORS, SHAPES, STYLES, TONES
from .renderer import BAR, LINE, PALETTE, RIM, SCALE, outline, stamp, toned
from .scenes import SIZE
from .sight import Box, Part, View, without_holes

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


def look(view: View, part: Part) -> Thing:
    """Measures one part."""
    rows, columns = part.place
    top, left = max(rows.start - _PAD, 0), max(columns.start - _PAD, 0)
    bottom, right = min(rows.stop + _PAD, SIZE), min(columns.stop + _PAD, SIZE)
    crop = (slice(top, bottom), slice(left, right))
    member = np.zeros((bottom - top, right - left), bool)
    member[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left] = part.member
    distance = np.where(ndimage.binary_dilation(member, iterations=2), view.distance[crop], 0.0)
    full = float(np.quantile(distance[member], 0.9))
    alpha = np.clip(distance / max(full, 1.0), 0.0, 1.0)
    solid = without_holes(member)
    soft = np.where(ndimage.binary_erosion(solid), 1.0, alpha)
    weight = soft.sum()
    grid_y, grid_x = np.mgrid[: soft.shape[0], : soft.shape[1]]
    x, y = float((soft * grid_x).sum() / weight), float((soft * grid_y).sum() / weight)
    profile, scale = profile_of(soft, x, y)
    misses, shape, turn, radius = _compare(profile, scale)
    middle = _middle(shape, turn, radius)
    light = (view.ground + 20.0) / (view.surface[crop] + 20.0)  # uneven light on the ground lies on the things, too
    colors, mean = _colors(view.raw[crop] * light, member, alpha)
    return Thing(
        box=part.box,
        x=left + x + 0.5 - middle[0],
        y=top + y + 0.5 - middle[1],
        radius=radius,
        misses=misses,
        styles=_styles(alpha, soft, (x - middle[0], y - middle[1]), radius, shape, turn),
        colors=colors,
        mean=mean,
        round_enough=_round(profile),
    )


@functools.cache
def _rays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    steps = np.arange(0.0, 40.0, 0.5)
    angle = 2 * np.pi * np.arange(ANGLES) / ANGLES
    return np.cos(angle)[:, None] * steps, np.sin(angle)[:, None] * steps, steps


def profile_of(soft: np.ndarray, x: float, y: float) -> tuple[np.ndarray, float]:
    """`(profile (48,), scale)`: the outline's distance from (x, y) in 48 directions, over its root mean square.

    `soft` (h, w) in [0, 1]. The distance is the integral of the mask along the ray, which a blur does not move.
    """
    across, down, steps = _rays()
    reach = np.searchsorted(steps, np.hypot(*soft.shape))
    values = ndimage.map_coordinates(soft, [y + down[:, :reach], x + across[:, :reach]], order=1, mode="constant")
    lengths = values.sum(1) * 0.5 - 0.25
    scale = float(np.sqrt(np.square(lengths).mean()))
    return lengths / max(scale, 1e-3), scale


@functools.cache
def _bank() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Profiles (M, 48), and of each: its shape's number, its turn in degrees, its radius, its scale (M, 4)."""
    profiles, labels = [], []
    for number, shape in enumerate(SHAPES):
        for radius in _RADII:
            mask = np.asarray(stamp(shape, "filled", 32, 32, radius).reduce(SCALE), np.float32) / 255.0
            for turn in _TURNS if shape != "circle" else (0,):
                turned = ndimage.rotate(mask, turn, reshape=False, order=1) if turn else mask
                for blur in (_BLUR_SEEN, 1.6):
                    soft = ndimage.gaussian_filter(turned, blur)
                    grid_y, grid_x = np.mgrid[:SIZE, :SIZE]
                    x, y = (soft * grid_x).sum() / soft.sum(), (soft * grid_y).sum() / soft.sum()
                    profile, scale = profile_of(soft, x, y)
                    profiles.append(profile)
                    labels.append((number, turn, radius, scale))
    table = np.array(labels)
    return np.stack(profiles), table[:, 0].astype(int), table[:, 1], table[:, 2:]


_BLUR_SEEN = 0.7  # the view's own


def _compare(profile: np.ndarray, scale: float) -> tuple[np.ndarray, str, float, float]:
    """Least distance from each shape (5,), and the nearest shape with its turn (degrees) and radius (pixels)."""
    profiles, numbers, turns, sizes = _bank()
    miss = np.sqrt(np.square(profiles - profile).mean(1))
    miss = miss + 0.02 * np.abs(np.log(max(scale, 1.0) / sizes[:, 1]))  # a profile of about its own size
    misses = np.array([miss[numbers == number].min() for number in range(len(SHAPES))])
    best = int(miss.argmin())
    return misses, SHAPES[numbers[best]], float(turns[best]), float(sizes[best, 0] * scale / sizes[best, 1])


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
def _patterns(shape: str, radius: float) -> dict[str, np.ndarray]:
    """The paint of each style, (k, 2 * _HALF + 1, ...): k is 1, and for stripes all places of the bars."""
    size = 2 * _HALF + 1
    middle = (_HALF + 0.5, _HALF + 0.5, radius, size)
    filled, hollow, rim = (_soft(shape, *middle, line) for line in (0.0, LINE, RIM))
    rows = np.arange(size)[:, None]
    bars = [np.maximum(rim, filled * (((rows + phase) // BAR) % 2 == 0)) for phase in range(2 * BAR)]
    patterns = {"filled": [filled], "outlined": [hollow], "striped": bars}
    return {style: np.stack([ndimage.gaussian_filter(p, _BLUR_SEEN) for p in patterns[style]]) for style in STYLES}


def _soft(shape: str, x: float, y: float, radius: float, size: int, line: float) -> np.ndarray:
    """A shape's mask, (size, size) in [0, 1]: filled, or its outline of a width in pixels."""
    mask = Image.new("L", (size * SCALE, size * SCALE))
    points = (SCALE * (np.array([x, y]) + radius * outline(shape))).ravel().tolist()
    if line:
        ImageDraw.Draw(mask).polygon(points, outline=255, width=round(line * SCALE))
    else:
        ImageDraw.Draw(mask).polygon(points, fill=255)
    return np.asarray(mask.reduce(SCALE), np.float32) / 255.0


def _styles(
    alpha: np.ndarray, soft: np.ndarray, middle: tuple[float, float], radius: float, shape: str, turn: float
) -> np.ndarray:
    """How well each of STYLES explains the paint inside the outline, (3,): 1 for exactly, 0 from a mean squared error
    of 0.12 on; the stripes may lie anywhere, and those of a circle at any of its turns.
    """
    patterns = _patterns(shape, round(2 * min(max(radius, 4.0), 24.0)) / 2)
    scores = np.zeros(len(STYLES))
    for angle in (turn,) if shape != "circle" else (0.0, -10.0, 10.0):
        inside = _squared((soft > 0.5).astype(np.float32), middle, angle) > 0.5
        paint = _squared(alpha, middle, angle)[inside]
        for i, style in enumerate(STYLES):
            errors = np.square(patterns[style][:, inside] - paint).mean(1) if len(paint) else np.ones(1)
            scores[i] = max(scores[i], 1.0 - float(errors.min()) / 0.12)
        if scores.max() > 0.75:
            break
    return scores


def _squared(mask: np.ndarray, middle: tuple[float, float], degrees: float) -> np.ndarray:
    """A mask turned back by an angle about `middle` (x, y), which comes to lie in the middle of the square."""
    angle = np.radians(-degrees)
    matrix = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    offset = np.array([middle[1], middle[0]]) - matrix @ np.array([_HALF, _HALF])
    size = 2 * _HALF + 1
    return ndimage.affine_transform(mask, matrix, offset, (size, size), order=1)


def _colors(pixels: np.ndarray, member: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of the painted pixels that have each colour in each tone (6, 3), and their mean RGB."""
    core = member & (alpha > 0.9)
    inner = core & ndimage.binary_erosion(member)
    chosen = pixels[inner if inner.sum() >= 0.3 * core.sum() and inner.sum() >= 6 else core]
    if not len(chosen):
        chosen = pixels[member]
    apart = np.linalg.norm(chosen[:, None] - _TABLE, axis=-1)
    nearest = np.where(apart.min(1) < _REACH, apart.argmin(1), len(_TABLE))
    shares = np.bincount(nearest, minlength=len(_TABLE) + 1)[:-1] / len(chosen)
    return shares.reshape(len(TONES), len(COLORS)).T, chosen.mean(0)


__all__ = ["LINE", "MAX_MISS", "MIN_PURE", "Thing", "look", "profile_of"]
