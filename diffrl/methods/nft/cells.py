"""DiffusionNFT's loss where each latent cell has an advantage of its own (`methods/shared/regions.py`)."""

from __future__ import annotations

from torch import Tensor


def contrast_of_cells(x0: Tensor, x0_theta: Tensor, x0_old: Tensor, b: float) -> Tensor:
    """(B, h, w): `L+ - L-` by latent cells, a mean over the channels, whose mean over the cells is that of phi."""

    def one(x0_side: Tensor) -> Tensor:
        difference = x0_side - x0
        w = difference.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
        return difference.square().mean(1) / w[:, None, None]

    return one((1 - b) * x0_old + b * x0_theta) - one((1 + b) * x0_old - b * x0_theta)


def excess_of_cells(contrast: Tensor, advantages: Tensor, cells: Tensor, adv_clip: float) -> Tensor:
    """(B, K): mean over cells of `(r(A + dA) - r(A)) (L+ - L-)`, for advantages (B, K) and what cells have above them,
    dA (B, K, h, w): what the loss with an advantage for each cell has above that with one for all."""
    whole = advantages[:, :, None, None]
    r, r_whole = (a.clamp(-adv_clip, adv_clip) / (2 * adv_clip) for a in (whole + cells, whole))
    return ((r - r_whole) * contrast[:, None]).mean((2, 3))
