"""Group diversity: how different the images of one prompt are, in a feature space (GARDO, arXiv 2512.24138).

Feature extractors map images (B, 3, H, W) float in [0, 1] to (B, F) features on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.worlds import worlds

Features = Callable[[Tensor], Tensor]


def group_diversity(features: Tensor, groups: Tensor) -> Tensor:
    """Mean pairwise `1 - cos` inside groups, averaged over groups: () in [0, 2], 0 for identical images; NaN where no
    group has two images.

    Args:
        features: (N, F).
        groups: (N,) integers; groups of one image count nothing.
    """
    return group_distances(features, groups).mean()


def group_distances(features: Tensor, groups: Tensor) -> Tensor:
    """The mean pairwise distance of each group that has two images or more: (G,), float64."""
    e = F.normalize(features.double(), dim=1)
    _, index = torch.unique(groups, return_inverse=True)
    count = torch.bincount(index).double()
    total = e.new_zeros(len(count), e.shape[1]).index_add_(0, index, e)
    # sum_{i != j} e_i . e_j = |sum_i e_i|^2 - n for unit vectors: no pairwise matrix needed.
    pairs = count * (count - 1)
    cosine = (total.square().sum(1) - count) / pairs
    return 1 - cosine[pairs > 0]


def pixel_features(images: Tensor) -> Tensor:
    """Mean colours of an 8 x 8 grid, centred: (B, 192). Needs no model; knows layout and colour, not content."""
    small = F.adaptive_avg_pool2d(images.float(), 8).flatten(1)
    return (small - 0.5).cpu()


def default_features(model: str) -> str:
    """The features of a model for which none are named: what its world has, else a grid of colours."""
    return worlds()[model].features if model in worlds() else "pixels"


def load_features(name: str, device: torch.device | str = "cpu") -> Features:
    """A feature extractor by name.

    Args:
        name: "pixels"; one of a world's, such as "clip" (the playground's CLIP image tower); else a vision model of
            transformers (DINOv2, DINOv3) as a local folder or hub id, for example `facebook/dinov2-base`.
        device: where the model runs.

    Raises:
        UserError: if the model cannot be loaded.
    """
    if name == "pixels":
        return pixel_features
    for world in worlds().values():
        if (space := world.feature_space(name, device)) is not None:
            return space
    from diffrl.vision_features import vision_features

    return vision_features(name, device)
