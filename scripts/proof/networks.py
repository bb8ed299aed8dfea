"""One network of true size in memory for all parts that need it: random weights are made once, then lent.

Making them takes longer than many a part. Whoever asks gets modules of their own, which a LoRA may be put into, whose
weights may be quantised and whose blocks may be compiled, over the same tensors.
"""

from __future__ import annotations

import copy
import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Pool:
    """The last pipeline that was made."""

    def __init__(self) -> None:
        self._key: tuple[str, torch.dtype] | None = None
        self._pipe: Any = None
        self._seconds = 0.0

    def lend(self, source: str, dtype: torch.dtype, make: Any) -> Any:
        """A pipeline over shared weights; `make()` makes it where another one is held, which is dropped first."""
        key = (Path(source).name, dtype)
        if key != self._key:
            self.drop()
            mark = time.monotonic()
            self._pipe, self._key = make(), key
            self._seconds = time.monotonic() - mark
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self.tensors()}
        return SimpleNamespace(**{name: copy.deepcopy(part, memo) for name, part in vars(self._pipe).items()})

    def take(self) -> float:
        """Seconds of making networks since this was last asked."""
        taken, self._seconds = self._seconds, 0.0
        return round(taken, 2)

    def tensors(self) -> list[Tensor]:
        """All weights and buffers that are held, and tables of positions that are plain attributes (Qwen-Image)."""
        modules = [] if self._pipe is None else [m for m in vars(self._pipe).values() if isinstance(m, nn.Module)]
        named = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        plain = [value for module in modules for one in module.modules() for value in vars(one).values()]
        return named + [value for value in plain if isinstance(value, Tensor)]

    def unused(self, *modules: nn.Module) -> int:
        """Bytes of the held weights that none of these modules has: the full ones beside a quantised network."""
        used = {tensor.untyped_storage()._cdata for module in modules for tensor in module.parameters()}
        beside = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.tensors()}
        return sum(size for storage, size in beside.items() if storage not in used)

    def drop(self) -> None:
        self._pipe = self._key = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


POOL = Pool()
