"""What the verifier sees before it names anything: the ground, and the parts of the picture that stand out from it.

d (H, W) is a pixel's distance from the ground's colour, in grey levels, after a light blur, so that a sensor's noise is
no thing. The ground may be lit unevenly: a quadratic surface is fitted to it. Whatever stands out is a part, and every
part counts: what no one can name is foreign, and then the picture shows more than it was asked for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import ndimage

from .scenes import SIZE

MIN_DISTANCE = 30.0  # grey levels: closer to the ground is ground
MIN_ALPHA = 0.45  # of the strongest pixel nearby: blurred edges are cut at about half height
MIN_AREA = 8  # pixels: smaller is a speck
FAINT, FAINT_AREA = 14.0, 12  # a ghost: so many levels off the ground, averaged over 5 x 5 pixels, on so many pixels
_BLUR = 0.7  # pixels
_EIGHT = np.ones((3, 3), bool)

Box = tuple[int, int, int, int]


def ramp(value: float, low: float, high: float) -> float:
    """0 at `low`, 1 at `high`, straight between and clipped outside; `low` may be the larger one."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


def to_pixels(images: Any) -> np.ndarray:
    """uint8 (B, 64, 64, 3) of images as float (B, 3, H, W) in [0, 1] or uint8 (B, H, W, 3), arrays or tensors.

    Other sizes are resized (bilinear, anti-aliased). Raises ValueError for any other form and for non-finite values.
    """
    import torch

    x = torch.as_tensor(images).detach().cpu()
    if x.ndim == 4 and x.shape[-1] == 3 and x.dtype == torch.uint8:
        x = x.permute(0, 3, 1, 2).float()
    elif x.ndim == 4 and x.shape[1] == 3 and x.dtype.is_floating_point:
        if not bool(torch.isfinite(x).all()):
            raise ValueError("images hold non-finite values")
        x = x.float().clamp(0, 1) * 255.0
    else:
        raise ValueError(
            f"images must be float (B, 3, H, W) in [0, 1] or uint8 (B, H, W, 3), not {x.dtype} {tuple(x.shape)}"
        )
    if x.shape[-2:] != (SIZE, SIZE):
        x = torch.nn.functional.interpolate(x, size=(SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
    return x.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


@functools.cache
def _surface_basis() -> np.ndarray:
    """1, x, y, x^2, xy, y^2 of every pixel, x and y from -1 to 1: (4096, 6)."""
    y, x = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j]
    return np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], -1).reshape(-1, 6)


@functools.cache
def _ring() -> np.ndarray:
    """The two outermost pixels all around, as a mask (64, 64)."""
    mask = np.ones((SIZE, SIZE), bool)
    mask[2:-2, 2:-2] = False
    return mask


def ground_of(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """`(colour, surface, cover)`: the ground's RGB where it is lit best, its colour at every pixel (64, 64, 3), and the
    share of the border that has it.
    """
    ring = pixels[_ring()]
    colour = np.median(ring, axis=0)
    basis, flat = _surface_basis(), pixels.reshape(-1, 3)
    surface = np.broadcast_to(colour, flat.shape).astype(np.float32)
    within = _ring().ravel()  # light skin is nearly white: the border says what the ground is
    for reach in (60.0, 25.0, 16.0):
        near = np.flatnonzero(within & (np.abs(flat - surface).max(1) < reach))
        if len(near) < 200:
            break
        index = near[:: max(len(near) // 500, 1)]  # so many pixels fix six numbers
        fitted, *_ = np.linalg.lstsq(basis[index], flat[index], rcond=None)
        surface = (basis @ fitted).astype(np.float32)
        within = np.ones(len(flat), bool)
    surface = surface.reshape(pixels.shape)
    cover = float((np.abs(ring - surface[_ring()]).max(1) < 32.0).mean())
    return np.quantile(surface[::4, ::4].reshape(-1, 3), 0.9, axis=0), surface, cover


@dataclass(frozen=True)
class Part:
    """One connected part that stands out. `member` (h, w) and `place`: its mask and where that lies in the picture."""

    place: tuple[slice, slice]
    member: np.ndarray

    @property
    def box(self) -> Box:
        """left, top, right, bottom (exclusive), in pixels."""
        rows, columns = self.place
        return columns.start, rows.start, columns.stop, rows.stop

    @property
    def area(self) -> int:
        """Pixels, without holes."""
        return int(self.member.sum())


class View:
    """One picture, uint8 (64, 64, 3), taken apart: `ground` (RGB), `cover`, `pixels` (blurred a little), `distance`."""

    def __init__(self, image: np.ndarray) -> None:
        raw = image.astype(np.float32)
        self.pixels = ndimage.gaussian_filter(raw, (_BLUR, _BLUR, 0))
        self.ground, self.surface, self.cover = ground_of(self.pixels)
        self.raw, self.offset = raw, raw - self.surface
        self.distance = np.sqrt(np.square(self.pixels - self.surface).sum(-1))

    @functools.cached_property
    def parts(self) -> list[Part]:
        """All parts of at least MIN_AREA pixels, largest first; gaps of a pixel are closed."""
        alpha = self.distance / np.maximum(ndimage.maximum_filter(self.distance, size=7), MIN_DISTANCE)
        mask = (self.distance > MIN_DISTANCE) & (alpha > MIN_ALPHA)
        labels, _ = ndimage.label(ndimage.binary_closing(np.pad(mask, 1), _EIGHT)[1:-1, 1:-1], structure=_EIGHT)
        parts = [Part(place, labels[place] == i) for i, place in enumerate(ndimage.find_objects(labels), start=1)]
        return sorted((part for part in parts if part.area >= MIN_AREA), key=lambda part: -part.area)

    @functools.cached_property
    def inked(self) -> np.ndarray:
        """All parts and what they enclose, as a mask (64, 64)."""
        mask = np.zeros((SIZE, SIZE), bool)
        for part in self.parts:
            mask[part.place] |= part.member
        return without_holes(mask)

    @functools.cached_property
    def ghosts(self) -> int:
        """How many faint things lie on the ground, away from the parts: a person sees them, so they count."""
        faint = np.linalg.norm(ndimage.uniform_filter(self.offset, (5, 5, 0)), axis=-1) > FAINT
        faint &= ~ndimage.binary_dilation(self.inked, _EIGHT, iterations=5)
        labels, count = ndimage.label(faint, structure=_EIGHT)
        return int((np.bincount(labels.ravel(), minlength=count + 1)[1:] >= FAINT_AREA).sum())


def without_holes(mask: np.ndarray) -> np.ndarray:
    """The mask and all that it encloses."""
    return ndimage.binary_fill_holes(mask)


def largest_part(mask: np.ndarray) -> np.ndarray:
    """The largest connected part of a mask."""
    labels, count = ndimage.label(mask)
    return mask if count < 2 else labels == 1 + int(np.argmax(np.bincount(labels.ravel())[1:]))
