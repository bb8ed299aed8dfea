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

from . import masks
from .scenes import SIZE

MIN_DISTANCE = 30.0  # grey levels: closer to the ground is ground
MIN_ALPHA = 0.45  # of the strongest pixel nearby: blurred edges are cut at about half height
MIN_AREA = 8  # pixels: smaller is a speck
FAINT, FAINT_AREA = 14.0, 12  # a ghost: so many levels off the ground, averaged over 5 x 5 pixels, on so many pixels
_BLUR = 0.7  # pixels
_APART = np.zeros((3, 3, 3), bool)
_APART[1] = True  # pixels touch aslant, too, but no other picture's

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
        form = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"images must be float (B, 3, H, W) in [0, 1] or uint8 (B, H, W, 3), not {form}")
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
    """The two outermost pixels all around: their places among the 4096."""
    mask = np.ones((SIZE, SIZE), bool)
    mask[2:-2, 2:-2] = False
    return np.flatnonzero(mask)


def _length(x: np.ndarray) -> np.ndarray:
    """Of the vectors along the last axis, of size 3: as np.linalg.norm, to the bit, which takes 20 times as long."""
    x = np.square(x)
    return np.sqrt(x[..., 0] + x[..., 1] + x[..., 2])


def _largest(x: np.ndarray) -> np.ndarray:
    """The largest absolute value along the last axis, of size 3."""
    x = np.abs(x)
    return np.maximum(np.maximum(x[..., 0], x[..., 1]), x[..., 2])


def _surface(flat: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """The ground's colour at every pixel (4096, 3) of a picture (4096, 3) whose border is mostly `colour`."""
    basis, surface = _surface_basis(), np.broadcast_to(colour, flat.shape).astype(np.float32)
    within: np.ndarray | slice = _ring()  # light skin is nearly white: the border says what the ground is
    for reach in (60.0, 25.0, 16.0):
        near = np.flatnonzero(_largest(flat[within] - surface[within]) < reach)
        near = near if isinstance(within, slice) else within[near]
        if len(near) < 200:
            break
        index = near[:: max(len(near) // 500, 1)]  # so many pixels fix six numbers
        fitted, *_ = np.linalg.lstsq(basis[index], flat[index], rcond=None)
        surface = (basis @ fitted).astype(np.float32)
        within = slice(None)
    return surface


@dataclass(frozen=True)
class Part:
    """One connected part that stands out. `member` (h, w) and `place`: its mask and where that lies in the picture."""

    place: tuple[slice, slice]
    member: np.ndarray
    area: int  # pixels, without holes

    @property
    def box(self) -> Box:
        """left, top, right, bottom (exclusive), in pixels."""
        rows, columns = self.place
        return columns.start, rows.start, columns.stop, rows.stop


@dataclass(frozen=True, eq=False)
class View:
    """One picture (64, 64, 3) taken apart.

    `raw`: its grey levels. `pixels`: blurred a little. `ground`: the ground's RGB where it is lit best; `surface`
    (64, 64, 3): its colour at every pixel; `cover`: the share of the border that has it. `distance` (64, 64) from it.
    `parts`: those of at least MIN_AREA pixels, largest first, gaps of a pixel closed. `inked`: all parts and what they
    enclose, as a mask. `ghosts`: how many faint things lie on the ground, away from the parts: a person sees them.
    """

    raw: np.ndarray
    pixels: np.ndarray
    ground: np.ndarray
    surface: np.ndarray
    cover: float
    distance: np.ndarray
    parts: list[Part]
    inked: np.ndarray
    ghosts: int


def views(images: np.ndarray) -> list[View]:
    """Pictures (B, 64, 64, 3), in grey levels, taken apart. Each is seen as it would be alone, to the bit."""
    raw = images.astype(np.float32)
    pixels = ndimage.gaussian_filter(raw, (0, _BLUR, _BLUR, 0))
    flat = pixels.reshape(len(raw), -1, 3)
    ring = flat[:, _ring()]
    colours = np.median(ring, axis=1)
    flat_surface = np.stack([_surface(*pair) for pair in zip(flat, colours, strict=True)])
    covers = (_largest(ring - flat_surface[:, _ring()]) < 32.0).mean(1)
    surface = flat_surface.reshape(raw.shape)
    grounds = np.quantile(surface[:, ::4, ::4].reshape(len(raw), -1, 3), 0.9, axis=1)
    distance = _length(pixels - surface)
    parts, inked = _parts(distance)
    ghosts = _ghosts(raw - surface, inked)
    each = zip(raw, pixels, grounds, surface, covers.tolist(), distance, parts, inked, ghosts, strict=True)
    return [View(*one) for one in each]


def _parts(distance: np.ndarray) -> tuple[list[list[Part]], np.ndarray]:
    """The parts of each picture, and `inked`."""
    highest = distance
    for axis in (1, 2):  # of 7 x 7 pixels, by maxima of 2, of 4 and of 7 in a row
        width = [(0, 0)] * 3
        width[axis] = (3, 3)
        highest = np.moveaxis(np.pad(highest, width), axis, 0)
        highest = np.maximum(highest[:-1], highest[1:])
        highest = np.maximum(highest[:-2], highest[2:])
        highest = np.moveaxis(np.maximum(highest[:-3], highest[3:]), 0, axis)
    mask = (distance > MIN_DISTANCE) & (distance / np.maximum(highest, MIN_DISTANCE) > MIN_ALPHA)
    labels = _label(masks.unpack(masks.closed(masks.pack(mask))))
    areas = np.bincount(labels.ravel())
    kept = areas >= MIN_AREA
    kept[0] = False
    parts: list[list[Part]] = [[] for _ in distance]
    for number, place in enumerate(ndimage.find_objects(labels), start=1):
        if kept[number]:
            parts[place[0].start].append(Part(place[1:], labels[place][0] == number, int(areas[number])))
    inked = masks.unpack(masks.filled(masks.pack(kept[labels])))
    return [sorted(those, key=lambda part: -part.area) for those in parts], inked


def _ghosts(offset: np.ndarray, inked: np.ndarray) -> list[int]:
    away = ~masks.unpack(masks.widened(masks.pack(inked), 5))
    # A mean in single precision says where none can be: it is at most a hundredth off the exact one, which takes long.
    padded = np.pad(offset, ((0, 0), (2, 2), (2, 2), (0, 0)), "symmetric")
    rows = padded[:, :-4] + padded[:, 1:-3] + padded[:, 2:-2] + padded[:, 3:-1] + padded[:, 4:]
    mean = rows[:, :, :-4] + rows[:, :, 1:-3] + rows[:, :, 2:-2] + rows[:, :, 3:-1] + rows[:, :, 4:]
    maybe = np.flatnonzero(((_length(mean) > 25 * (FAINT - 0.1)) & away).sum((1, 2)) >= FAINT_AREA)
    ghosts = [0] * len(offset)
    if len(maybe):
        faint = _length(ndimage.uniform_filter(offset[maybe], (0, 5, 5, 0))) > FAINT
        labels = _label(faint & away[maybe])
        large = np.bincount(labels.ravel()) >= FAINT_AREA
        for i, picture in zip(maybe, labels, strict=True):
            ghosts[i] = int(large[np.unique(picture[picture > 0])].sum())
    return ghosts


def _label(masks_: np.ndarray) -> np.ndarray:
    """Of each connected part of each mask (B, 64, 64) a number of its own, in reading order; 0 where nothing is."""
    return ndimage.label(masks_, structure=_APART)[0]


def without_holes(mask: np.ndarray) -> np.ndarray:
    """The mask and all that it encloses."""
    return ndimage.binary_fill_holes(mask)


def largest_part(mask: np.ndarray) -> np.ndarray:
    """The largest connected part of a mask."""
    labels, count = ndimage.label(mask)
    return mask if count < 2 else labels == 1 + int(np.argmax(np.bincount(labels.ravel())[1:]))
