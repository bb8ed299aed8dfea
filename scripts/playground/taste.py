"""The playground's synthetic taste: what its aesthetic head is trained to predict.

A stand-in for human ratings whose truth is computable: colourful, contrasty and centred pictures please. The head
sees only CLIP embeddings of rendered images, so it is right on the world's images and exploitable off them.
"""

from __future__ import annotations

import numpy as np


def taste(images: np.ndarray) -> np.ndarray:
    """Ratings (N,) in [1, 10] of images uint8 (N, H, W, 3).

    Colourfulness after Hasler and Suesstrunk (2003), contrast as the standard deviation of luminance, centredness as
    the distance of the foreground's centre of mass from the middle; equal weights.
    """
    x = images.astype(np.float32) / 255.0
    red, green, blue = x[..., 0], x[..., 1], x[..., 2]
    rg, yb = red - green, 0.5 * (red + green) - blue
    spread = np.sqrt(rg.std((1, 2)) ** 2 + yb.std((1, 2)) ** 2)
    colourful = spread + 0.3 * np.sqrt(rg.mean((1, 2)) ** 2 + yb.mean((1, 2)) ** 2)
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    contrast = luminance.std((1, 2))
    background = np.median(x.reshape(len(x), -1, 3), axis=1)[:, None, None, :]
    mass = np.abs(x - background).sum(-1) + 1e-6
    rows, columns = np.linspace(-1, 1, x.shape[1]), np.linspace(-1, 1, x.shape[2])
    total = mass.sum((1, 2))
    off_row = (mass.sum(2) * rows).sum(1) / total
    off_column = (mass.sum(1) * columns).sum(1) / total
    centred = 1.0 - np.clip(np.hypot(off_row, off_column), 0.0, 1.0)
    # Divisors put rendered images between about 0.2 and 1 in every part.
    parts = np.stack([colourful / 0.4, contrast / 0.3, centred], axis=0)
    return 1.0 + 9.0 * np.clip(parts, 0.0, 1.0).mean(0)
