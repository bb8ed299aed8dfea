"""Networks whose shapes depend on values, counted on tensors without values: the values of layouts are kept.

Some networks ask a mask how long a text is, or put tokens in the places that a mask names. Fake tensors could not say.
But masks and positions are small, and are made of sizes alone. So inside `Layout` whole numbers and truth values that
depend on no fake tensor are real, and everything else is fake. Entered inside a FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Made from a tensor's size and device, of whatever values it has or has not.
LIKE = {aten.new_ones, aten.new_zeros, aten.new_full, aten.ones_like, aten.zeros_like, aten.full_like}
WIDE = ("layer_norm", "group_norm", "rms_norm", "upsample_nearest2d")  # of ATen/autocast_mode.h, what networks call
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._index_put_impl_}


class Layout(TorchDispatchMode):
    """See the module's documentation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a third of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        tensors = _tensors(args) + (_tensors(kwargs.values()) if kwargs else [])
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if packet in LIKE and _whole(kwargs.get("dtype") or args[0].dtype):
            with unset_fake_temporarily():
                return func(
                    torch.empty(args[0].shape, dtype=args[0].dtype),
                    *args[1:],
                    **{**kwargs, "device": torch.device("cpu")},
                )
        if not fake and (all(_whole(tensor.dtype) for tensor in tensors) if tensors else _makes_whole(func, kwargs)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if fake and packet in INDEXING:
            args = (args[0], [place for index in args[1] for place in _places(index)], *args[2:])
        return func(*args, **kwargs)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside, the CPU's autocast has fake tensors' norms in float32, as CUDA's: what a norm keeps is a copy there."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in WIDE:
            library.impl(name, partial(_wide, getattr(aten, name).default), "AutocastCPU")
        yield


def _wide(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return func(*(one.float() if isinstance(one, FakeTensor) else one for one in args), **kwargs)


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    """Those of an operation's arguments, which may be lists: torch's own walk through trees takes much longer."""
    found = list[Tensor]()
    for one in arguments:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += _tensors(one)
    return found


def _whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _makes_whole(func: Any, kwargs: dict[str, Any]) -> bool:
    """Is this a factory of whole numbers? Those that name no type make floats, except `arange` of whole numbers."""
    return kwargs.get("dtype") is not None and _whole(kwargs["dtype"])


def _places(index: Tensor | None) -> list[Tensor | None]:
    """A mask with values as the places that it names, of which there is a known number."""
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return [index]
    with unset_fake_temporarily():
        return list(index.nonzero().unbind(1))


def pretend(module: nn.Module) -> None:
    """Put fake tensors of the CPU in the place of the meta device's: autocast knows the CPU.

    Weights that are alike share one: nothing is read or written, and none of them is counted where it is used. Frozen
    ones are one parameter, too, so that the module's bytes are to be asked for before.
    """
    fakes = dict[tuple[torch.Size, torch.dtype], Tensor]()
    frozen = dict[tuple[torch.Size, torch.dtype], nn.Parameter]()
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                if (key := (p.shape, p.dtype)) not in fakes:  # codes of weights, too, are whole numbers, and no layout
                    fakes[key] = torch.empty(p.shape).to(p.dtype)
                if p.requires_grad:
                    part._parameters[name] = nn.Parameter(fakes[key])
                    continue
                if key not in frozen:
                    frozen[key] = nn.Parameter(fakes[key], requires_grad=False)
                part._parameters[name] = frozen[key]
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = _empty(b)
        for name, table in list(vars(part).items()):  # of rotary embeddings, which are no buffers in some networks
            if isinstance(table, list) and table and all(isinstance(one, Tensor) for one in table):
                setattr(part, name, [_empty(one) for one in table])


def _empty(tensor: Tensor) -> Tensor:
    made = torch.zeros if _whole(tensor.dtype) else torch.empty  # whole numbers are real, floats are fake
    return made(tensor.shape, dtype=tensor.dtype)
