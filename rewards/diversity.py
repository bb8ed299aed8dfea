"""Diversity inside a group of images of one prompt: what each image adds to it.

Shapes: n images of a group, H x W pixels, D the width of an embedding. `x` are unit vectors (n, D).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffrl.rewards.protocol import RewardError
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice
from diffrl_zoo.vision import Looker

RANGES = {"nearest": (0.0, 2.0), "vendi": (float("-inf"), float("inf"))}


def effective_number(values: Tensor) -> Tensor:
    """exp of the entropy of a kernel's eigenvalues (..., D), which sum to 1: the Vendi score."""
    return torch.special.entr(values.clamp(min=0.0)).sum(-1).exp()


def vendi_score(x: Tensor) -> Tensor:
    """exp of the entropy of the eigenvalues of `x x^T / n`, in [1, n]: the effective number of distinct images.

    Friedman and Dieng 2022 (arXiv:2210.02410), equation 3, with the cosine as the kernel. float64.
    """
    x = (x.cpu() if x.device.type == "mps" else x).double()  # Apple's devices have no float64
    # x x^T and x^T x share their nonzero eigenvalues; the group is the smaller side.
    return effective_number(torch.linalg.eigvalsh(x @ x.T / len(x)))


def vendi_contributions(x: Tensor) -> Tensor:
    """(n,): Vendi score of the group minus that of the group without each image; negative for a repetition."""
    keep = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    return torch.stack([vendi_score(x) - vendi_score(x[others]) for others in keep])


def nearest_distances(x: Tensor) -> Tensor:
    """(n,): cosine distance (0 to 2) of every image to the nearest other image of the group."""
    distances = 1.0 - x @ x.T
    distances.fill_diagonal_(torch.inf)
    return distances.min(dim=1).values.clamp(0.0, 2.0)


@dataclass(eq=False, repr=False, kw_only=True)
class Diversity(Looker):
    """What each image adds to its group's diversity; group-wise, so a group needs two images at least.

    `mode`: nearest (cosine distance to the nearest other image) or vendi (Vendi score with minus without the image).
    The encoder: see `Looker`.
    """

    name = "diversity"
    groupwise = True
    card = card_of(name)

    mode: str = "nearest"
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, RANGES, "diversity")
        self.look()
        self.card = replace(self.card, range=RANGES[self.mode])

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Contributions (n,) of the images (n, 3, H, W) in [0, 1] of one group."""
        if len(images) < 2:
            raise RewardError("diversity: a group of one image has no diversity; set rollout.group_size to 2 or more")
        x = torch.cat([self.encoder.embed_image(part) for part in images.split(self.batch_size)])
        return (nearest_distances(x) if self.mode == "nearest" else vendi_contributions(x)).float()
