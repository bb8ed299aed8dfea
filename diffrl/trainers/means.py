"""What an objective logs: means over an epoch's rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor


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

    def take(self) -> dict[str, Tensor]:
        sums, self._sums = self._sums, {}
        return sums
