"""Reads a cartoon head from pixels: skin, hair, mood, glasses and hat.

The head is fitted by its silhouette, then looked at in the zones where the renderer draws its parts. Zones are in the
renderer's units, around the middle of the head, y downwards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from diffrl.playground.grammar import HAIRS, SKINS, Head
from diffrl.playground.renderer import HAT, PALETTE, SCALE, SIZE, SKIN
from diffrl.playground.sight import MIN_DISTANCE, largest_part, ramp, without_holes

# In units: a head without a hat is 47 wide, the brim of a hat 50, the chin 22 below the middle (renderer._draw_head).
_WIDTHS = {False: 47.0, True: 50.0}
_CHIN = 22.0
_SKIN_COLORS = np.array([SKIN[name] for name in SKINS], np.float32)
_HAIR_COLORS = np.array([PALETTE[name] for name in HAIRS], np.float32)
_HAT_COLOR = np.array(HAT, np.float32)


@dataclass(frozen=True)
class Face:
    """The measurements of a head.

    `presence`: how much this is a head at all, in [0, 1]. `skin` (3,) and `hair` (4,): distances to SKINS and HAIRS in
    grey levels. `smile`: how far the middle of the mouth lies below its ends, in units, negative in a frown. `mouth`:
    its ink over what a mouth has, in [0, 1]. `glasses`, `hat`: likeness in [0, 1].
    """

    presence: float
    skin: np.ndarray
    hair: np.ndarray
    smile: float
    mouth: float
    glasses: float
    hat: float

    @property
    def head(self) -> Head | None:
        """The attributes as the grammar names them, or None where no head is seen."""
        if self.presence < 0.5:
            return None
        skin, hair = SKINS[int(self.skin.argmin())], HAIRS[int(self.hair.argmin())]
        return Head(skin, hair, "smiling" if self.smile > 0 else "frowning", self.glasses > 0.5, self.hat > 0.5)


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


def _fit(foreground: np.ndarray, hat: bool) -> tuple[float, float, float] | None:
    """(x, y, unit) of the head whose width and chin fit the foreground's box, or None if that is no head's size."""
    columns, rows = np.flatnonzero(foreground.sum(0) > 1), np.flatnonzero(foreground.sum(1) > 1)
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

    def __init__(self, pixels: np.ndarray, fit: tuple[float, float, float]) -> None:
        x, y, self.unit = fit
        self.pixels = pixels
        self.across = (np.arange(SIZE) + 0.5 - x)[None, :] / self.unit
        self.down = (np.arange(SIZE) + 0.5 - y)[:, None] / self.unit

    def within(self, inner: float, outer: float, top: float, bottom: float) -> np.ndarray:
        """Mask of |x| in [inner, outer], y in [top, bottom]."""
        side = np.abs(self.across)
        return (side >= inner) & (side <= outer) & (self.down >= top) & (self.down <= bottom)


def find_face(pixels: np.ndarray, distance: np.ndarray) -> Face | None:
    """The face in an image, or None where nothing is large enough. `pixels`, `distance`: as for `sight.find_blobs`."""
    foreground = without_holes(largest_part(distance > MIN_DISTANCE))
    fit = _fit(foreground, False)
    if fit is None:
        return None
    rows = np.flatnonzero(foreground.sum(1) > 1)
    crown = _Zones(pixels, fit).within(0, 10, -100, 100) & (np.arange(SIZE)[:, None] < rows[0] + 12)
    hat = float(_near(pixels[crown & foreground], _HAT_COLOR).mean())
    hatted = hat > 0.5
    fit = _fit(foreground, hatted)
    assert fit is not None
    zones = _Zones(pixels, fit)
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
    return Face(
        presence=_presence(foreground, zones, hatted) * colored,
        skin=skins,
        hair=hairs,
        smile=smile,
        mouth=mouth,
        glasses=ramp(lenses.mean(), 0.42, 0.72),
        hat=ramp(hat, 0.2, 0.8),
    )


def _presence(foreground: np.ndarray, zones: _Zones, hatted: bool) -> float:
    """Overlap of the foreground with a head's silhouette: 0 at an intersection over union of 0.65, 1 at 0.9."""
    mask = _silhouette(hatted)
    columns = np.round(zones.across[0] + 31.5).astype(int).clip(0, SIZE - 1)
    rows = np.round(zones.down[:, 0] + 35.5).astype(int).clip(0, SIZE - 1)
    expected = mask[np.ix_(rows, columns)]
    return ramp((expected & foreground).sum() / max((expected | foreground).sum(), 1), 0.65, 0.9)


def _mouth(darkness: np.ndarray, zones: _Zones) -> tuple[float, float]:
    """How far the mouth's middle lies below its ends, in units, and its ink over what a mouth has."""
    ink = np.where(zones.within(0, 10, 8, 18), darkness, 0.0)
    middle, ends = ink * zones.within(0, 3, 8, 18), ink * zones.within(5.5, 10, 8, 18)
    amount = float(ink.sum() / (50.0 * zones.unit**2))
    if middle.sum() < 2.0 or ends.sum() < 2.0:
        return 0.0, min(amount, 1.0)
    height = [float((part * zones.down).sum() / part.sum()) for part in (middle, ends)]
    return height[0] - height[1], min(amount, 1.0)
