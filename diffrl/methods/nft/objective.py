"""DiffusionNFT: negative-aware fine-tuning on the forward process (arXiv 2509.16117).

symbol        name here          meaning
v_theta       theta              prediction (x0, eps, v) with the trained LoRA
v_old         old                prediction with the slowly following snapshot
r             r                  reward probability, clip(A) / (2 A_max) + 1/2
b             b                  guidance strength of the implicit positive and negative policies
L+, L-        phi[:, 0], [:, 1]  self-normalised reconstruction losses of the two policies
-             phi[:, 2:]         of advantages by latent cells (`methods/shared/regions.py`): a column for each reward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffrl.forward import Prediction
from diffrl.methods.nft import NFTSection
from diffrl.methods.shared.spatial import Spatial, SpatialRows
from diffrl.objectives.noising import Noising
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy

ADV_CLIP = 5.0  # A_max


def contrastive_losses(x0: Tensor, x0_theta: Tensor, x0_old: Tensor, b: float) -> Tensor:
    """phi = (L+, L-), (B, 2): x0 losses of the implicit positive and negative policies.

    The paper mixes velocities, `v+ = (1 - b) v_old + b v_theta`, and takes x0+ of it. For given x_t and t, x0 is affine
    in the velocity on every path (x_t - t v, or alpha x_t - sigma v), so mixing the x0 predictions is the same.
    """

    def one(x0_side: Tensor) -> Tensor:
        difference = x0_side - x0
        # The weight is a constant of the step (stop-gradient), at least 1e-5.
        w = difference.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
        return difference.square().flatten(1).mean(1) / w

    sides = (1 - b) * x0_old + b * x0_theta, (1 + b) * x0_old - b * x0_theta
    return torch.stack([one(side) for side in sides], dim=1)


def nft_loss(phi: Tensor, advantages: Tensor, adv_clip: float, b: float) -> Tensor:
    """(B, K) losses `A_max / b * (r L+ + (1 - r) L-)`, affine in the advantages where they are not clipped."""
    r = advantages.clamp(-adv_clip, adv_clip) / (2 * adv_clip) + 0.5
    return adv_clip / b * (r * phi[:, :1] + (1 - r) * phi[:, 1:])


class NFT(Spatial):
    """The objective of DiffusionNFT. Its penalty is `beta * mean (v_theta - v_ref)^2`, v_ref the pretrained model."""

    samples_from = "old"
    # L+ + L- weighs the same for all rewards (r and 1 - r sum to 1), and does not change with theta while old is theta;
    # L+ - L- carries the advantages.
    basis = ((1.0, 1.0), (1.0, -1.0))

    def __init__(self, keys: NFTSection | None = None, **values: Any) -> None:
        keys = NFTSection.of(keys, values)
        how: dict[str, Any] = {"noising": Noising.of(keys), "decays": {"old": keys.old}}
        super().__init__(beta=keys.beta, advantage_std=keys.advantage_std, **how)
        self.b, self.adv_clip = keys.b, ADV_CLIP

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        assert isinstance(rows, SpatialRows), "rows() makes them"
        rows.prediction = theta = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        if self.on_policy:  # then no second forward is needed
            old = Prediction(*(form.detach() for form in (theta.x0, theta.eps, theta.v)))
        else:
            with torch.no_grad(), policy.adapter("old"):
                old = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        self.means.add("nft/drift", (theta.v.detach() - old.v).square().flatten(1).mean(1))
        phi = contrastive_losses(rows.x0, theta.x0, old.x0, self.b)
        if rows.cells is None:
            return phi
        from diffrl.methods.nft.cells import contrast_of_cells, excess_of_cells

        contrast = contrast_of_cells(rows.x0, theta.x0, old.x0, self.b)
        return torch.cat([phi, excess_of_cells(contrast, rows.advantages, rows.cells, self.adv_clip)], dim=1)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """Rows that a reward does not apply to are masked: an advantage of 0 is not nothing, it holds theta to old."""
        assert isinstance(rows, SpatialRows), "rows() makes them"
        losses = nft_loss(phi[:, :2], rows.advantages, self.adv_clip, self.b)
        if rows.cells is not None:
            losses = losses + self.adv_clip / self.b * phi[:, 2:]
        return losses.sum(0) if rows.known is None else (losses * rows.known).sum(0)
