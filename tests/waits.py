"""A stand-in for an accelerator that records where the host would wait for it.

On a GPU work is queued, and the host runs ahead until it asks for a value. Here tensors of the device are marked CPU
tensors, and every call that would make the host wait is written down with the line of diffrl that made it: values that
are read (`item`, `tolist`, `float`, `bool`, `cpu`, masks), and copies to the device that wait for it (without
`non_blocking`, from `torch.tensor`, by an index that lies on the host).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import diffrl

DEVICE = torch.device("cpu", 0)  # the host's own is torch.device("cpu"), without a number
PACKAGE = str(Path(diffrl.__file__).parent)
READS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__float__, Tensor.__bool__, Tensor.__int__),
    *(Tensor.__index__, Tensor.nonzero, torch.nonzero, Tensor.unique, torch.unique, Tensor.masked_select),
    *(torch.masked_select, Tensor.equal, torch.equal, torch.allclose, Tensor.allclose),
}
FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.eye, torch.rand}
ITEMS = {Tensor.__getitem__, Tensor.__setitem__}


class OnDevice(Tensor):
    """A tensor of the device."""


def marked(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


class Waits(TorchFunctionMode):
    """While it is entered: `seen` counts the waits by kind and place, ("read", "rollout.py:277")."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = [isinstance(x, OnDevice) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if any(there) else func(*args, **kwargs)
        if func is Tensor.to:
            return self._to(args, kwargs)
        if func in READS and any(there):
            self._note("read")
            return _home(func(*args, **kwargs))
        if func in ITEMS and isinstance(args[0], OnDevice):
            self._index(args[1])
        made = func(*args, **kwargs)
        if kwargs.get("device") == DEVICE:
            if func is torch.tensor:
                self._note("copy")
            if func is torch.tensor or func in FACTORIES:
                return marked(made)
        return made

    def _to(self, args: Any, kwargs: Any) -> Any:
        target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
        before = isinstance(args[0], OnDevice)
        if isinstance(target, Tensor):
            after = isinstance(target, OnDevice)
        elif isinstance(target, torch.device | str):
            after = torch.device(target) == DEVICE
        else:
            after = before
        made = Tensor.to(*args, **kwargs)
        if before and not after:
            self._note("read")  # the host must have it whole before it goes on, whatever it was asked for
        elif after and not before and not kwargs.get("non_blocking"):
            self._note("copy")
        return marked(made) if after else _home(made)

    def _index(self, index: Any) -> None:
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, Tensor) and part.ndim and not isinstance(part, OnDevice):
                self._note("copy")
            elif isinstance(part, Tensor) and part.dtype == torch.bool:
                self._note("read")

    def _note(self, kind: str) -> None:
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):  # type: ignore[redundant-expr]
            frame = frame.f_back  # type: ignore[assignment]
        place = "outside"
        if frame is not None:
            place = f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}"
        self.seen[kind, place] += 1


def _home(made: Any) -> Any:
    return tree_map_only(OnDevice, lambda tensor: tensor.as_subclass(Tensor), made)
