"""Latents in the forms that several families have them in: packed into tokens, and scaled by channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pack(x: Tensor, patch: int = 2) -> Tensor:
    """(B, C, h, w) as tokens (B, h/p * w/p, p^2 C): squares of p x p, channel-major."""
    b, c, h, w = x.shape
    p = patch
    return x.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, h // p * (w // p), p * p * c)


def unpack(tokens: Tensor, h: int, w: int, patch: int = 2) -> Tensor:
    """The inverse of `pack`: (B, h/p * w/p, p^2 C) as (B, C, h, w)."""
    b, _, width = tokens.shape
    p = patch
    squares = tokens.view(b, h // p, w // p, width // p**2, p, p)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(b, width // p**2, h, w)


def channelwise(values: Any, like: Tensor) -> Tensor:
    """A value for each latent channel, of a config or a buffer, to be broadcast over (B, C, h, w)."""
    return torch.as_tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)


def to_norm_of(combined: Tensor, positive: Tensor, dim: int = -1) -> Tensor:
    """`combined` scaled, along `dim`, to the norm of the conditional prediction."""
    return combined * (positive.norm(dim=dim, keepdim=True) / combined.norm(dim=dim, keepdim=True))
