"""What the text encoders say about prompts: one row per prompt, of its own length where the network takes a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Conditioning:
    """Of B prompts, in the encoders' type.

    Tokens come first and padding after them, so a row's length says which of its T places hold something. Lengths stay
    on the CPU: cutting a batch down to its longest text waits for no device.
    """

    embeds: Tensor  # (B, T, D), or (B, T, layers, D)
    pooled: Tensor  # (B, W); W = 0 in families without a pooled embedding
    lengths: Tensor | None = None  # (B,) int64 on the CPU; None: all T, of a network that takes no mask
    extra: tuple[Tensor, ...] = ()  # whatever else the family's network is given, each (B, ...)
    first: int = 0  # number of the first row among all prompts of an epoch, of which a process holds its own alone

    def __len__(self) -> int:
        return len(self.embeds)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeds, self.pooled, *self.extra))

    @property
    def mask(self) -> Tensor:
        """(B, T) bool where the embeddings are: True for a token, False for padding."""
        b, length = self.embeds.shape[:2]
        if self.lengths is None:
            return self.embeds.new_ones(b, length, dtype=torch.bool)
        places = torch.arange(length, device=self.embeds.device)
        return places < self.lengths.to(self.embeds.device, non_blocking=True)[:, None]

    @property
    def padded(self) -> bool:
        """Is any place padding? Where none is, attention needs no mask, and its fast kernels take none."""
        return self.lengths is not None and bool((self.lengths < self.embeds.shape[1]).any())

    def rows(self) -> list[Tensor]:
        """Every row's tokens without padding, (T_i, D) each, for networks that take a list."""
        if self.lengths is None:
            return list(self.embeds)
        return [row[:length] for row, length in zip(self.embeds, self.lengths.tolist(), strict=True)]

    def select(self, index: Tensor) -> Conditioning:
        """The rows of prompts `index` (n,) int64, gathered where the embeddings are, cut to the longest of them."""
        index = index - self.first
        lengths = None if self.lengths is None else self.lengths[index.to("cpu")]
        longest = self.embeds.shape[1] if lengths is None else int(lengths.max()) if len(lengths) else 0
        index = index.to(self.embeds.device, non_blocking=True)
        extra = tuple(tensor.index_select(0, index) for tensor in self.extra)
        return Conditioning(
            self.embeds[:, :longest].index_select(0, index), self.pooled.index_select(0, index), lengths, extra
        )

    def to(self, device: torch.device | str) -> Conditioning:
        """On the way to an accelerator the host goes on at once; on the way back it must wait for the values."""
        queued = torch.device(device).type != "cpu"
        extra = tuple(tensor.to(device, non_blocking=queued) for tensor in self.extra)
        embeds, pooled = self.embeds.to(device, non_blocking=queued), self.pooled.to(device, non_blocking=queued)
        return Conditioning(embeds, pooled, self.lengths, extra, self.first)

    def expand(self, rows: int) -> Conditioning:
        """One row repeated without a copy."""
        tensors = (self.embeds, self.pooled, *self.extra)
        embeds, pooled, *extra = (tensor.expand(rows, *tensor.shape[1:]) for tensor in tensors)
        lengths = None if self.lengths is None else self.lengths.expand(rows)
        return Conditioning(embeds, pooled, lengths, tuple(extra))

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """The parts' rows, one after the other, padded with zeros to the longest text."""
        longest = max(part.embeds.shape[1] for part in parts)
        lengths = None if parts[0].lengths is None else torch.cat([p.lengths for p in parts if p.lengths is not None])
        if lengths is None and any(part.embeds.shape[1] != longest for part in parts):
            raise ValueError("texts of different length, from a family whose network takes no mask")
        return Conditioning(
            torch.cat([_pad(part.embeds, longest) for part in parts]),
            torch.cat([part.pooled for part in parts]),
            lengths,
            tuple(torch.cat(tensors) for tensors in zip(*(part.extra for part in parts), strict=True)),
        )


def _pad(embeds: Tensor, length: int) -> Tensor:
    missing = length - embeds.shape[1]
    return F.pad(embeds, [0, 0] * (embeds.ndim - 2) + [0, missing]) if missing else embeds
