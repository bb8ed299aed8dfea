"""How far an image is off the playground's manifold: the distance of its patches to those of rendered images.

Held out from training, it shows reward hacking that the verifier's facts do not name: textures, ghosts, halos, blends.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from .renderer import render
from .scenes import SIZE, complete, sample_caption
from .sight import to_pixels

PATCH = 8
BANK_IMAGES = 4000
BANK_SEED = 20260
_AXES = 10  # principal axes of the search: 90 % of the patches' variance
_CANDIDATES = 4


def _patches(pixels: np.ndarray) -> np.ndarray:
    """The 8 x 8 patches of a grid: uint8 (B, 64, 64, 3) -> (B * 64, 192)."""
    cells = SIZE // PATCH
    grid = pixels.reshape(-1, cells, PATCH, cells, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    return grid.reshape(-1, PATCH * PATCH * 3)


def bank_images(count: int = BANK_IMAGES) -> np.ndarray:
    """The first `count` of the bank's rendered images, uint8 (count, 64, 64, 3), from a fixed seed."""
    rng = np.random.default_rng(BANK_SEED)
    return np.stack([render(complete(sample_caption(rng, "train"), rng)) for _ in range(count)])


@functools.cache
def _bank() -> tuple[np.ndarray, np.ndarray, cKDTree]:
    """The patches (M, 192) uint8, all different; axes (192, 10); a tree over `patches @ axes`."""
    patches = _patches(bank_images())
    # Equal patches (flat ones, above all) are kept once; a random projection finds them faster than sorting rows.
    weights = np.random.default_rng(0).random(patches.shape[1])
    key = np.concatenate([part @ weights for part in np.array_split(patches, 32)])
    patches = patches[np.unique(key, return_index=True)[1]]
    values = patches.astype(np.float32)
    axes = np.linalg.eigh(np.cov(values, rowvar=False))[1][:, -_AXES:].astype(np.float32)
    return patches, axes, cKDTree(values @ axes)


def artefact(images: Any) -> Tensor:
    """Distance (B,), float32, of images to the world's renderings, in shares of the range from black to white.

    Each of the 64 patches is compared with the nearest of about 97,000 different patches of 4,000 rendered images (four
    candidates by their principal axes, then the least root mean square over the patch's 192 values), and the image's
    value is the mean. An image of the bank has 0. Medians: fresh renderings 0.016 (their places and sizes lie between
    those of the bank), renderings blurred by 2 pixels 0.033, blends of two 0.055, with noise of 6 % 0.06; pure noise
    0.29. `images`: as for `verifier.verify`; ValueError for another form.
    """
    known, axes, tree = _bank()
    patches = _patches(to_pixels(images)).astype(np.float32)
    _, candidates = tree.query(patches @ axes, k=_CANDIDATES, eps=0.5)
    difference = known[candidates] - patches[:, None]
    distance = np.sqrt(np.square(difference).mean(-1)).min(1) / 255.0
    return torch.from_numpy(distance.reshape(-1, (SIZE // PATCH) ** 2).mean(1).astype(np.float32))
