"""Blocks that are alike are counted once: a deep network's middle blocks are played by what was seen of one of them.

Of a run of alike blocks the first two and the last are run. Between the first two it is seen what a block leaves
alive, what it puts out and how many operations it takes; the others make tensors of these sizes. Bytes only rise
through a run in the forward pass, and only fall, or only rise, in the backward pass, so that the most of them is at an
end of the run, where real blocks are. A block whose call is unlike that of the one before is run itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from diffrl.memory.buffers import Alive

LEAST = 4  # blocks of a run: three of them are run
PLAIN = (int, float, str, bool, tuple, type(None))


@contextmanager
def repeated(network: nn.Module, alive: Alive) -> Iterator[None]:
    """Inside, the middle blocks of the network's runs are played."""
    with ExitStack() as stack:
        for run in runs(network):
            played = Played(run, alive)
            for number, block in enumerate(run):
                own = vars(block).get("forward")
                stack.callback(*((delattr, block, "forward") if own is None else (setattr, block, "forward", own)))
                block.forward = played.of(number, block.forward)  # type: ignore[method-assign]
        yield


def runs(network: nn.Module) -> list[list[nn.Module]]:
    """Consecutive blocks of a list that are alike in their parts, shapes and settings; the outermost lists."""
    found, inside = list[list[nn.Module]](), set[int]()
    for part in network.modules():
        if not isinstance(part, nn.ModuleList) or len(part) < LEAST or id(part) in inside:
            continue
        run, before = list[nn.Module](), None
        for block in [*part, None]:
            own = None if block is None else _kind(block)
            if own != before and run:
                if len(run) >= LEAST:
                    found.append(run)
                    inside |= {id(deep) for one in run for deep in one.modules()}
                run = []
            run, before = [*run, *([] if block is None else [block])], own
    return found


def _kind(block: nn.Module) -> list[Any]:
    parts = list[Any]()
    for name, part in block.named_modules():
        plain = {key: value for key, value in vars(part).items() if isinstance(value, PLAIN) and "idx" not in key}
        tensors = [
            (key, t.shape, t.dtype, t.requires_grad)
            for table in (part._parameters, part._buffers)
            for key, t in table.items()
            if t is not None
        ]
        parts.append((name, type(part), plain, tensors))
    return parts


@dataclass(frozen=True)
class Made:
    """A tensor that a block put out: in which of its output's storages, and how it lies there."""

    storage: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: Any
    dtype: torch.dtype


@dataclass
class Seen:
    """Of a real block, for one kind of call."""

    entered: int  # bytes alive when it was called
    inputs: list[tuple[weakref.ref[Any], int]]  # storages and bytes: which of them were kept is seen later
    outputs: list[tuple[weakref.ref[Any], int]] = field(default_factory=list)
    operations: int = 0  # of its forward pass
    made: list[Any] | None = None  # what it put out; None: nothing that can be made again
    form: Any = None  # of the output
    kept: list[bool] = field(default_factory=list)
    left: int | None = None  # bytes that it left alive beside its output and inputs; None: not known


class Played:
    """A run of alike blocks, in one phase."""

    def __init__(self, run: list[nn.Module], alive: Alive) -> None:
        self.run, self.alive = run, alive
        self.seen = dict[Any, Seen]()
        self.started: int | None = None  # operations before the last block's backward pass
        self.backward = 0  # and of it
        self.always = list[Tensor]()  # what blocks keep where they keep nothing for a backward pass

    def of(self, number: int, forward: Any) -> Any:
        """What stands in the place of block `number`'s own forward."""
        last = number == len(self.run) - 1

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, form = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            key = (torch.is_grad_enabled(), str(form), *((t.shape, t.dtype, t.requires_grad) for t in tensors))
            again = torch._C._current_graph_task_id() != -1  # recomputed, in the backward pass
            seen = self.seen.get(key)
            if number == 2 and not again and seen is not None:
                self._measure(seen, tensors)
            if number > 1 and not last and seen is not None and seen.left is not None:
                return self._play(number, seen, tensors, again)
            if number != 1 or again:
                output = forward(*args, **kwargs)
                if last and not again:
                    self._watch(output)
                return output
            seen = self.seen[key] = Seen(self.alive.now, _storages(tensors), operations=self.alive.operations)
            output = forward(*args, **kwargs)
            seen.operations = self.alive.operations - seen.operations
            made, seen.form = tree_flatten(output)
            seen.made = _described(made, {t.untyped_storage()._cdata for t in tensors})
            seen.outputs = _storages(made)
            return output

        return call

    def _measure(self, seen: Seen, inputs: Sequence[Tensor]) -> None:
        """When block 2 is called, it shows what block 1 left, beside what comes and goes with each block's call."""
        if seen.made is None:
            return
        seen.kept = [storage() is not None for storage, _ in seen.inputs]
        there = {id(storage()): nbytes for storage, nbytes in seen.inputs if storage() is not None}
        gone = sum({id(storage): nbytes for storage, nbytes in seen.inputs if storage() is None}.values())
        come = {
            id(storage()): nbytes for storage, nbytes in [*seen.outputs, *_storages(inputs)] if storage() is not None
        }
        new = sum(nbytes for key, nbytes in come.items() if key not in there)
        left = self.alive.now - seen.entered - new + gone
        seen.left = left if left >= 0 else None

    def _watch(self, output: Any) -> None:
        """Note where the last block's backward pass begins: at the first gradient of what it put out."""

        def begin(gradient: Tensor) -> None:
            self.started = self.alive.operations if self.started is None else self.started

        self.started = None
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(begin)

    def _play(self, number: int, seen: Seen, tensors: Sequence[Tensor], again: bool) -> Any:
        if not again:  # what is recomputed is a part of the backward pass
            self.alive.operations += seen.operations
        graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        dropped = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # until they are recomputed
        if not again and (dropped or not graph):
            self.always.append(_bytes(seen.left))
        made = _Block.apply(self, number, seen, *tensors) if graph else _make(seen.made)  # type: ignore[no-untyped-call]
        return tree_unflatten(list(made), seen.form)

    def after(self, number: int) -> None:
        """Block `number` has gone backward: its parameters have gradients where the last block's have."""
        if number == len(self.run) - 2:
            self.backward = self.alive.operations - (self.started or 0)
        self.alive.operations += self.backward
        for own, other in zip(self.run[number].parameters(), self.run[-1].parameters(), strict=True):
            if own.grad is None and other.grad is not None:
                own.grad = torch.empty_like(other.grad)


class _Block(torch.autograd.Function):
    """A block's tensors: what it keeps for its backward pass, and gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, played: Played, number: int, seen: Seen, *tensors: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.played, ctx.number = played, number
        ctx.inputs = [(tensor.shape, tensor.dtype) for tensor in tensors]
        kept = [tensor for tensor, there in zip(tensors, seen.kept, strict=True) if there]
        ctx.save_for_backward(*kept, _bytes(seen.left))
        return tuple(_make(seen.made))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors  # recomputes them, if they were not kept
        ctx.played.after(ctx.number)
        needed = zip(ctx.inputs, ctx.needs_input_grad[3:], strict=True)
        return (None, None, None, *(torch.empty(shape, dtype=dtype) if own else None for (shape, dtype), own in needed))


def _storages(tensors: Sequence[Any]) -> list[tuple[weakref.ref[Any], int]]:
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return [(weakref.ref(storage), storage.nbytes()) for storage in storages]


def _bytes(count: int | None) -> Tensor:
    return torch.empty((count or 0) // 4)  # floats: whole numbers would be real (`diffrl.memory.layout`)


def _described(outputs: Sequence[Any], inputs: set[int]) -> list[Any] | None:
    """What `_make` needs; None where an output lies in an input, or is no plain tensor."""
    made = list[Any]()
    for one in outputs:
        if not isinstance(one, Tensor):
            made.append(one)
            continue
        storage = one.untyped_storage()
        if storage._cdata in inputs or not one.dtype.is_floating_point:
            return None
        made.append(Made(storage._cdata, storage.nbytes(), one.shape, one.stride(), one.storage_offset(), one.dtype))
    return made


def _make(made: Sequence[Any] | None) -> list[Any]:
    """Outputs as they were: those of one storage lie in one again."""
    storages, outputs = dict[int, Tensor](), list[Any]()
    for one in made or ():
        if not isinstance(one, Made):
            outputs.append(one)
            continue
        if one.storage not in storages:
            storages[one.storage] = torch.empty(one.nbytes // one.dtype.itemsize, dtype=one.dtype)
        outputs.append(storages[one.storage].as_strided(one.shape, one.stride, one.offset))
    return outputs
