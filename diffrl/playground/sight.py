"""What the verifier sees: the ground, and the blobs on it with their place, colour, shape and style, from pixels alone.

d (H, W) is a pixel's distance from the ground's colour, alpha (H, W) in [0, 1] that distance relative to the strongest
pixel nearby, so a blurred edge is cut at half height and weak things beside strong ones are kept.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy import ndimage

from diffrl.playground.grammar import SHAPES, STYLES
from diffrl.playground.renderer import SCALE, SIZE, stamp

MIN_DISTANCE = 26.0  # grey levels: closer to the ground is ground
MIN_ALPHA = 0.45
MIN_AREA = 12  # pixels: smaller is a speck
GRID = 20  # silhouettes are compared on a grid of GRID x GRID over their bounding box
_BLURS = (0.0, 1.5)  # pixels: a generator's shapes are rounder than the renderer's
_EIGHT = np.ones((3, 3), bool)

Box = tuple[int, int, int, int]


def ramp(value: float, low: float, high: float) -> float:
    """0 at `low`, 1 at `high`, straight between and clipped outside; `low` may be the larger one."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True)
class Blob:
    """One connected thing. `box`: left, top, right, bottom (exclusive); `area`: pixels, holes included.

    `color`: RGB, 0 to 255; `shapes` and `styles`: likeness to each of SHAPES and STYLES, in [0, 1].
    """

    box: Box
    x: float
    y: float
    area: float
    color: np.ndarray
    shapes: np.ndarray
    styles: np.ndarray

    @property
    def width(self) -> int:
        return self.box[2] - self.box[0]

    @property
    def height(self) -> int:
        return self.box[3] - self.box[1]


def to_pixels(images: Any) -> np.ndarray:
    """uint8 (B, 64, 64, 3) of images as float (B, 3, H, W) in [0, 1] or uint8 (B, H, W, 3), arrays or tensors.

    Other sizes are resized (bilinear, anti-aliased). Raises ValueError for any other form and for non-finite values.
    """
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


def ground_of(pixels: np.ndarray) -> tuple[np.ndarray, float]:
    """The colour of the two outermost pixels all around (RGB), and the share of them that has it."""
    inner = pixels[2:-2]
    parts = (pixels[:2], pixels[-2:], inner[:, :2], inner[:, -2:])
    ring = np.concatenate([part.reshape(-1, 3) for part in parts])
    ground = np.median(ring, axis=0)
    return ground, float((np.abs(ring - ground).max(1) < 32.0).mean())


def distances(pixels: np.ndarray, ground: np.ndarray) -> np.ndarray:
    """d (H, W): how far every pixel is from the ground's colour, in grey levels."""
    return np.sqrt(((pixels - ground) ** 2).sum(-1))


def without_holes(mask: np.ndarray) -> np.ndarray:
    """The mask and all that it encloses."""
    labels, _ = ndimage.label(~np.pad(mask, 1))
    return (labels != labels[0, 0])[1:-1, 1:-1]


def largest_part(mask: np.ndarray) -> np.ndarray:
    """The largest connected part of a mask."""
    labels, count = ndimage.label(mask)
    return mask if count < 2 else labels == 1 + int(np.argmax(np.bincount(labels.ravel())[1:]))


def find_blobs(pixels: np.ndarray, distance: np.ndarray) -> list[Blob]:
    """All things on the ground, largest first. `pixels`: float (64, 64, 3), 0 to 255; `distance`: d (64, 64)."""
    alpha = distance / np.maximum(ndimage.maximum_filter(distance, size=7), MIN_DISTANCE)
    labels, _ = ndimage.label((distance > MIN_DISTANCE) & (alpha > MIN_ALPHA), structure=_EIGHT)
    blobs: list[Blob] = []
    for i, place in enumerate(ndimage.find_objects(labels), start=1):
        member = labels[place] == i
        if member.sum() >= MIN_AREA:
            origin = (place[1].start, place[0].start)
            blobs += [_blob(pixels[place], alpha[place], part, origin) for part in _parts(pixels[place], member)]
    return sorted(blobs, key=lambda blob: -blob.area)


def _parts(pixels: np.ndarray, member: np.ndarray) -> list[np.ndarray]:
    """A component as one mask, or as two where things of two colours touch (2-means on the colours)."""
    core = ndimage.binary_erosion(member)
    colors = pixels[core]
    if len(colors) < 40 or np.abs(colors - np.median(colors, axis=0)).mean() < 20.0:
        return [member]
    middle = colors.mean(0)
    first = colors[np.argmax(((colors - middle) ** 2).sum(1))]
    second = colors[np.argmax(((colors - first) ** 2).sum(1))]
    centres = np.stack([first, second])
    for _ in range(6):
        nearest = ((colors[:, None] - centres) ** 2).sum(-1).argmin(1)
        if nearest.min() == nearest.max():
            return [member]
        centres = np.stack([colors[nearest == k].mean(0) for k in (0, 1)])
    if np.linalg.norm(centres[0] - centres[1]) < 70.0:
        return [member]
    side = ((pixels[:, :, None] - centres) ** 2).sum(-1).argmin(-1)
    parts = [largest_part(member & (side == k)) for k in (0, 1)]
    return parts if min(part.sum() for part in parts) > 0.2 * member.sum() else [member]


def _blob(pixels: np.ndarray, alpha: np.ndarray, member: np.ndarray, origin: tuple[int, int]) -> Blob:
    rows, columns = np.flatnonzero(member.any(1)), np.flatnonzero(member.any(0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    member, alpha, pixels = (part[top:bottom, left:right] for part in (member, alpha, pixels))
    # Closed first: an outline may have a gap of a pixel at the tip of a star.
    solid = without_holes(member | ndimage.binary_closing(member, _EIGHT))
    core = ndimage.binary_erosion(member)
    if core.sum() < 0.25 * member.sum():
        core = member & (alpha >= np.quantile(alpha[member], 0.6))
    silhouette = np.where(member, alpha, solid.astype(np.float32))
    x, y = left + origin[0], top + origin[1]
    return Blob(
        box=(int(x), int(y), int(right + origin[0]), int(bottom + origin[1])),
        x=float(x + (right - left) / 2),
        y=float(y + (bottom - top) / 2),
        area=float(solid.sum()),
        color=np.median(pixels[core], axis=0),
        shapes=_likeness(silhouette),
        styles=_pattern(member, alpha, solid),
    )


def _gridded(silhouette: np.ndarray) -> np.ndarray:
    small = Image.fromarray((255 * silhouette).astype(np.uint8)).resize((GRID, GRID), Image.Resampling.BILINEAR)
    return np.asarray(small, np.float32) / 255.0


@functools.cache
def _templates() -> tuple[np.ndarray, np.ndarray]:
    """Mean silhouettes over sizes and sub-pixel places, sharp and as a blur rounds them, and the shapes' aspects.

    Shapes (len(SHAPES), len(_BLURS), GRID, GRID) and, width over height, (len(SHAPES),).
    """
    rng = np.random.default_rng(0)
    grids: list[np.ndarray] = []
    aspects: list[float] = []
    for shape in SHAPES:
        seen: dict[float, list[np.ndarray]] = {blur: [] for blur in _BLURS}
        aspect = []
        for radius in (7, 8, 9, 10, 11, 12, 15, 18, 21):
            for x, y in 32 + rng.uniform(-0.5, 0.5, (3, 2)):
                mask = np.asarray(stamp(shape, "filled", x, y, radius).reduce(SCALE), np.float32) / 255.0
                for blur in _BLURS:
                    soft = ndimage.gaussian_filter(mask, blur) if blur else mask
                    alpha = soft / np.maximum(ndimage.maximum_filter(soft, size=7), 0.1)
                    rows, columns = (np.flatnonzero((alpha > MIN_ALPHA).any(axis)) for axis in (1, 0))
                    crop = alpha[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                    seen[blur].append(_gridded(np.where(crop > MIN_ALPHA, crop, 0.0)))
                    aspect.append(crop.shape[1] / crop.shape[0])
        grids.append(np.stack([np.mean(seen[blur], axis=0) for blur in _BLURS]))
        aspects.append(float(np.mean(aspect)))
    return np.stack(grids), np.array(aspects)


def _likeness(silhouette: np.ndarray) -> np.ndarray:
    """Overlap (intersection over union) with each shape's silhouette in the same box, less if the box is off, (6,)."""
    grids, aspects = _templates()
    seen = _gridded(silhouette)
    overlap = np.minimum(grids, seen).sum((-2, -1)) / np.maximum(grids, seen).sum((-2, -1))
    stretch = (silhouette.shape[1] / silhouette.shape[0]) / aspects
    return overlap.max(1) * np.minimum(1.0, 1.15 * np.minimum(stretch, 1.0 / stretch))


def _pattern(member: np.ndarray, alpha: np.ndarray, solid: np.ndarray) -> np.ndarray:
    """Likeness of the inside of a blob to each of STYLES (4,); the sum is 1.

    Filled: the mean alpha of the inside is high. Striped: the row means explain its variance, the column means do not.
    Of the others, outlined is emptier than dotted, most so deep inside.
    """
    inside = ndimage.binary_erosion(solid, iterations=2)
    if inside.sum() < 6:
        inside = solid
    deep = ndimage.binary_erosion(inside)
    weight = inside.astype(np.float32)
    values = np.where(inside, alpha, 0.0)
    mean = float(values.sum() / weight.sum())
    variance = float((weight * (alpha - mean) ** 2).sum() / weight.sum()) + 1e-6
    rows, columns = (_explained(values, weight, mean, axis) / variance for axis in (1, 0))
    filled = ramp(mean, 0.8, 0.95)
    striped = (1.0 - filled) * ramp(rows - columns, 0.1, 0.8)
    empty = ramp(float(alpha[deep].mean()) if deep.sum() >= 6 else mean, 0.55, 0.35)
    rest = 1.0 - filled - striped
    likeness = {"filled": filled, "striped": striped, "outlined": rest * empty, "dotted": rest * (1.0 - empty)}
    return np.array([likeness[style] for style in STYLES])


def _explained(values: np.ndarray, weight: np.ndarray, mean: float, axis: int) -> float:
    """Variance of the row means (axis 1) or of the column means (axis 0)."""
    total = weight.sum(axis)
    means = values.sum(axis) / np.maximum(total, 1e-6)
    return float((total * (means - mean) ** 2).sum() / total.sum())
