"""What an objective logs: means over an epoch's rows, and quantiles of what spreads over decades."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

DECADES, BINS = -12, 20  # quantiles are known between 1e-12 and 1, to a 20th of a decade (12 %)
QUANTILES = {"p50": 0.5, "p99": 0.99}


class RunningMeans:
    """Sums and counts that stay on the device until the epoch's end: no wait for the device in the loop."""

    pausing: ClassVar[bool] = False

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Inside, rows count as nothing: no mean of any objective sees them, and they have no penalty."""
        cls.pausing = True
        try:
            yield
        finally:
            cls.pausing = False

    def add(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Add detached per-row values (b,); of them only those `where` (b,) bool, if given: a mask would wait."""
        values = values.detach().float()
        count = values.new_full((), float(values.numel()))
        if where is not None:
            values, count = torch.where(where, values, 0.0), where.sum().float()
        pair = torch.stack([values.sum(), count])
        if self.pausing:
            pair = torch.zeros_like(pair)  # the name stays: processes sum by position
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def spread(self, name: str, values: Tensor) -> None:
        """Count detached per-row values (b,) >= 0 by their size: as with means, processes need only add their sums."""
        place = (values.detach().float().log10().clamp(DECADES, 0) - DECADES).mul(BINS).ceil().long()
        ones = torch.full_like(place, 0 if self.pausing else 1, dtype=torch.float32)
        counts = ones.new_zeros(1 - DECADES * BINS).index_add_(0, place, ones)
        self._sums[name] = self._sums[name] + counts if name in self._sums else counts

    def take(self) -> dict[str, Tensor]:
        sums, self._sums = self._sums, {}
        return sums


def summaries(sums: Mapping[str, Tensor]) -> dict[str, float | None]:
    """The numbers that sums over all processes stand for: a pair's mean; NAME/p50 and NAME/p99 of a spread.

    A quantile is the upper end of its bin: so large a share of the rows is not above it. None: there were no rows.
    """
    numbers: dict[str, float | None] = {}
    for name, values in sums.items():
        if len(values) == 2:
            numbers[name] = float(values[0] / values[1]) if values[1] else None
            continue
        below = values.double().cumsum(0).cpu()
        for label, share in QUANTILES.items():
            place = int((below < share * below[-1]).sum())
            numbers[f"{name}/{label}"] = 10 ** (DECADES + place / BINS) if below[-1] else None
    return numbers
