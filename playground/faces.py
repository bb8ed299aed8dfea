"""Reads a cartoon head from pixels: skin, hair, mood, glasses and hat.

The head is fitted by its silhouette, then looked at in the zones where the renderer draws its parts. Zones are in the
renderer's units, around the middle of the head, y downwards.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from .grammar import HAIRS, SKINS
from .renderer import GROUNDS, HAT, PALETTE, SCALE, SKIN, render
from .scenes import SIZE, Place, Scene
from .sight import MIN_AREA, MIN_DISTANCE, View, largest_part, ramp, without_holes

# In units: a head without a hat is 47 wide, the brim of a hat 50, the chin 22 below the middle (renderer._draw_head).
_WIDTHS = {False: 47.0, True: 50.0}
_CHIN = 22.0
MIN_SMILE = 0.8  # units
_STRONG = 100.0  # grey levels from the ground: hair and hat, not light skin on white, nor a blurred edge
_SKIN_COLORS = np.array([SKIN[name] for name in SKINS], np.float32)
_HAIR_COLORS = np.array([PALETTE[name] for name in HAIRS], np.float32)
_HAT_COLOR = np.array(HAT, np.float32)


@dataclass(frozen=True)
class Face:
    """The measurements of a head.

    `presence`: how much this is a head at all, in [0, 1]. `skin` (3,) and `hair` (4,): distances to SKINS and HAIRS in
    grey levels. `smile`: how far the middle of the mouth lies below its ends, in units, negative in a frown. `mouth`:
    its ink over what a mouth has, in [0, 1]. `glasses`, `hat`: likeness in [0, 1]. `alone`: nothing else is there.
    """

    presence: float
    skin: np.ndarray
    hair: np.ndarray
    smile: float
    mouth: float
    glasses: float
    hat: float
    alone: bool = True

    @property
    def sure(self) -> bool:
        """Whether this is a head, with a mouth that can be told."""
        return self.presence > 0.5 and abs(self.smile) > MIN_SMILE and self.alone

    @functools.cached_property
    def features(self) -> dict[str, str] | None:
        """The features as the grammar names them, or None where no head is seen."""
        if self.presence < 0.5:
            return None
        return {
            "skin": SKINS[int(self.skin.argmin())],
            "hair": HAIRS[int(self.hair.argmin())],
            "mood": "smiling" if self.smile > 0 else "frowning",
            "glasses": "yes" if self.glasses > 0.5 else "no",
            "hat": "yes" if self.hat > 0.5 else "no",
        }


@functools.cache
def _silhouette(hat: bool) -> np.ndarray:
    """The mean head's mask in units, (64, 64), its middle at (32, 36)."""
    canvas = Image.new("L", (SIZE * SCALE, SIZE * SCALE))
    pen = ImageDraw.Draw(canvas)

    def box(x: float, y: float, rx: float, ry: float) -> tuple[float, float, float, float]:
        return SCALE * (32 + x - rx), SCALE * (36 + y - ry), SCALE * (32 + x + rx), SCALE * (36 + y + ry)

    pen.ellipse(box(0, -3, 23.5, 22.5), fill=255)
    pen.ellipse(box(0, 2, 18.5, 20), fill=255)
    if hat:
        pen.rectangle(box(0, -23, 15, 9), fill=255)
        pen.rectangle(box(0, -14.5, 25, 2.6), fill=255)
    return np.asarray(canvas.reduce(SCALE)) > 127


def _fit(foreground: np.ndarray, strong: np.ndarray, hat: bool) -> Place | None:
    """(x, y, unit) of the head whose width and chin fit, or None if that is no head's size. `strong`: hair and hat."""
    columns, rows = np.flatnonzero(strong.sum(0) > 1), np.flatnonzero(foreground.sum(1) > 1)
    if len(columns) < 30 or len(rows) < 30:
        return None
    left, right, bottom = columns[0], columns[-1] + 1, rows[-1] + 1
    unit = float(np.clip((right - left) / _WIDTHS[hat], 0.8, 1.2))
    return (left + right) / 2, bottom - _CHIN * unit, unit


def _near(pixels: np.ndarray, color: np.ndarray) -> np.ndarray:
    """1 at the colour, 0 from 110 grey levels away."""
    return np.clip(1.4 - np.sqrt(((pixels - color) ** 2).sum(-1)) / 80.0, 0.0, 1.0)


class _Zones:
    """The coordinates of all pixels in the units of a fitted head."""

    def __init__(self, fit: Place) -> None:
        self.x, self.y, self.unit = fit
        self.across = (np.arange(SIZE) + 0.5 - self.x)[None, :] / self.unit
        self.down = (np.arange(SIZE) + 0.5 - self.y)[:, None] / self.unit

    def within(self, inner: float, outer: float, top: float, bottom: float) -> np.ndarray:
        """Mask of |x| in [inner, outer], y in [top, bottom]."""
        side = np.abs(self.across)
        return (side >= inner) & (side <= outer) & (self.down >= top) & (self.down <= bottom)


def find_face(view: View) -> Face | None:
    """The face in a picture, or None where nothing is large enough."""
    pixels = view.pixels * ((view.ground + 20.0) / (view.surface + 20.0))  # uneven light lies on the head, too
    standing_out = without_holes(view.distance > MIN_DISTANCE)
    foreground = largest_part(standing_out)
    strong = foreground & (view.distance > _STRONG)
    fit = _fit(foreground, strong, False)
    if fit is None:
        return None
    rows = np.flatnonzero(foreground.sum(1) > 1)
    crown = _Zones(fit).within(0, 10, -100, 100) & (np.arange(SIZE)[:, None] < rows[0] + 12)
    topmost = pixels[crown & foreground]
    hat = float(_near(topmost, _HAT_COLOR).mean()) if len(topmost) else 0.0  # two towers have nothing between them
    hatted = hat > 0.5
    fit = _fit(foreground, strong, hatted)
    assert fit is not None
    labels, count = ndimage.label(standing_out & ~foreground)
    others = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    alone = not (others >= MIN_AREA).any() and not view.ghosts
    face = _measured(view, pixels, foreground, fit, hat, alone)
    if face.sure:
        return face
    again = _measured(view, pixels, foreground, _refined(foreground, fit, hatted), hat, alone)
    return max(face, again, key=lambda one: (one.sure, one.presence))


def _measured(view: View, pixels: np.ndarray, foreground: np.ndarray, fit: Place, hat: float, alone: bool) -> Face:
    """The face under one fit. `hat`: how pink the crown is, in [0, 1]; `alone`: whether nothing else is there."""
    zones = _Zones(fit)
    skin_zone = zones.within(0, 13, 5.6, 7.8) | zones.within(11, 14.5, 6, 11)
    hair_zone = zones.within(0, 14, -11, -8.6) | zones.within(19.8, 22.3, -8, 2)
    skin = np.median(pixels[skin_zone], axis=0)
    hair = np.median(pixels[hair_zone], axis=0)
    darkness = np.clip(1.25 - pixels.sum(-1) / max(float(skin.sum()), 60.0) * 1.6, 0.0, 1.0)
    lenses = darkness[zones.within(3.4, 11.8, -4.0, 3.0)]
    smile, mouth = _mouth(darkness, zones)
    skins = np.linalg.norm(_SKIN_COLORS - skin, axis=1)
    hairs = np.linalg.norm(_HAIR_COLORS - hair, axis=1)
    colored = ramp(skins.min(), 120.0, 40.0) * ramp(hairs.min(), 140.0, 60.0)
    face = Face(
        presence=ramp(_overlap(foreground, fit, hat > 0.5), 0.65, 0.88) * colored,
        skin=skins,
        hair=hairs,
        smile=smile,
        mouth=mouth,
        glasses=ramp(lenses.mean(), 0.42, 0.72),
        hat=ramp(hat, 0.2, 0.8),
        alone=alone,
    )
    if face.presence < 0.5:
        return face
    return replace(face, presence=face.presence * ramp(_strange(pixels, view, face, zones), 30.0, 14.0))


def _strange(pixels: np.ndarray, view: View, face: Face, zones: _Zones) -> float:
    """Pixels in one piece that a drawing of the head as it was read does not explain: the largest such piece."""
    ground = min(GROUNDS, key=lambda name: float(np.linalg.norm(np.array(GROUNDS[name]) - view.ground)))
    scene = Scene("heads", (face.features or {}) | {"background": ground}, ((zones.x, zones.y, zones.unit),))
    drawn = render(scene).astype(np.float32)
    head = ndimage.binary_erosion(np.abs(drawn - drawn[0, 0]).sum(-1) > 30.0, iterations=2)
    # A pixel is explained if its colour lies between those that the drawing has around it, edges being soft.
    low, high = (extreme(drawn, (5, 5, 1)) for extreme in (ndimage.minimum_filter, ndimage.maximum_filter))
    apart = np.linalg.norm(np.maximum(np.maximum(low - pixels, pixels - high), 0.0), axis=-1) > 60.0
    labels, count = ndimage.label(apart & head)
    return float(np.bincount(labels.ravel(), minlength=count + 1)[1:].max(initial=0))


def _overlap(foreground: np.ndarray, fit: Place, hatted: bool) -> float:
    """Intersection over union of the foreground with a head's silhouette."""
    x, y, unit = fit
    columns = np.round((np.arange(SIZE) + 0.5 - x) / unit + 31.5).astype(int).clip(0, SIZE - 1)
    rows = np.round((np.arange(SIZE) + 0.5 - y) / unit + 35.5).astype(int).clip(0, SIZE - 1)
    expected = _silhouette(hatted)[np.ix_(rows, columns)]
    return float((expected & foreground).sum() / max((expected | foreground).sum(), 1))


_STEPS = tuple(itertools.product((0.0, -1.0, 1.0), (0.0, -1.0, 1.0, -2.0, 2.0), (1.0, 0.95, 1.05)))


def _refined(foreground: np.ndarray, fit: Place, hatted: bool) -> Place:
    """The fit nearby whose silhouette overlaps best: a blur or a tilt moves the box's edges, but not the area."""
    x, y, unit = fit
    tries = [(x + dx, y + dy, min(max(unit * scale, 0.8), 1.2)) for dx, dy, scale in _STEPS]
    return max(tries, key=lambda one: _overlap(foreground, one, hatted))


def _mouth(darkness: np.ndarray, zones: _Zones) -> tuple[float, float]:
    """How far the mouth's middle lies below its ends, in units, and its ink over what a mouth has."""
    ink = np.where(zones.within(0, 10, 8, 18), darkness, 0.0)
    middle, ends = ink * zones.within(0, 3, 8, 18), ink * zones.within(5.5, 10, 8, 18)
    amount = float(ink.sum() / (50.0 * zones.unit**2))
    if middle.sum() < 2.0 or ends.sum() < 2.0:
        return 0.0, min(amount, 1.0)
    height = [float((part * zones.down).sum() / part.sum()) for part in (middle, ends)]
    return height[0] - height[1], min(amount, 1.0)
