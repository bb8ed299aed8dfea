"""LoRA's arithmetic in fewer and larger products; peft's layers stay where the matrices live.

peft computes `W x`, `A x`, `B A x`, a scaling and a sum, each in a kernel of its own, for every layer. Here

- layers that get the same input (q, k and v of an attention) are one group: one product with their A's, one with W;
- in full precision the forward is one product with the merged weight `W + s B A` (`diffrl.policy.merged`), and so is
  the input's gradient. The LoRA costs four thin products in the backward pass, instead of six, and no memory but its
  input's, which the group shares;
- in bf16 and fp16, and over a sharded or a quantised W, the update is added in place to what the layer itself gives.

The values and gradients are peft's up to the rounding of the last place. Nothing changes in how LoRAs are stored,
switched, saved or loaded.

symbol        name here     meaning
x, y          x, y          input (..., in) and outputs side by side (..., S) of a group
W' , s A, B_i weight, down, ups
h, p          h, p          s x A^T and dy B, (rows, n r)
dA, dB        -             s p^T x and dy^T h
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from diffrl.policy.merged import Matrices, Merged, Shelf

# Projections of an attention that read one input, by their names in diffusers.
TOGETHER = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))


class Sink(Protocol):
    """Where weight gradients go instead of `parameter.grad`: MARBLE's bank."""

    def open(self) -> bool:
        """Does it take gradients now?"""

    def take(self, parameters: Sequence[Tensor], x: Tensor, y: Tensor) -> None:
        """Gradients `y_i^T x` (out_i, in) of several matrices with one input x (b, T, in); y (b, T, sum of out_i)."""


class Group:
    """Layers with one input, computed together when the first of them is called; the others' outputs wait."""

    def __init__(self, owner: Fused, names: Sequence[str], layers: Sequence[PeftLinear]) -> None:
        self.owner, self.names, self.layers = owner, list(names), list(layers)
        self.peft: list[Callable[..., Tensor]] = [partial(PeftLinear.forward, layer) for layer in layers]
        bases: list[Any] = [layer.base_layer for layer in layers]
        first = layers[0]
        self.plain = all(type(base) is nn.Linear for base in bases)
        self.sizes = [int(base.out_features) for base in bases]
        self.scale = float(next(iter(first.scaling.values())))
        self.shelf = Shelf(bases, self.scale)
        self._matrices: dict[str, tuple[Tensor, ...]] = {}
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}
        self.install()

    def install(self) -> None:
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._forward, number)  # type: ignore[method-assign]

    def matrices(self, name: str) -> tuple[Tensor, ...]:
        """A_1, B_1, A_2, B_2, ... of a snapshot."""
        if name not in self._matrices:
            pairs: list[Any] = [(layer.lora_A[name].weight, layer.lora_B[name].weight) for layer in self.layers]
            self._matrices[name] = tuple(matrix for pair in pairs for matrix in pair)
        return self._matrices[name]

    def _forward(self, number: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler fuses for itself, but cannot write to a sink
            call = self.peft[number] if self.owner.sink is None else partial(_outside, self, number)
            return call(x, *args, **kwargs)
        return self._call(number, x, *args, **kwargs)

    def _call(self, number: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._input is x and number in self._waiting:
            output = self._waiting.pop(number)
            if not self._waiting:
                self._input = None
            return output
        if number in self._waiting:  # asked for another input than the first one's: these belong apart
            self.owner.part(self)
            return self.layers[number].forward(x, *args, **kwargs)
        active = self.owner.active
        if len(active) != 1 or active[0] == "base" or args or kwargs or self.layers[number].disable_adapters:
            return self.peft[number](x, *args, **kwargs)
        outputs = self._run(x, active[0])
        if len(outputs) > 1:
            self._input = x
            self._waiting = {i: output for i, output in enumerate(outputs) if i != number}
        return outputs[number]

    def _run(self, x: Tensor, name: str) -> Sequence[Tensor]:
        owner, matrices = self.owner, self.matrices(name)
        narrow = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        silent = not torch.is_grad_enabled()
        if self.plain and owner.merging:
            weight = self.layers[0].base_layer.weight
            if narrow is None and x.dtype == weight.dtype == matrices[0].dtype:
                return self._merged(x, self.shelf.merged(name, matrices), matrices, silent)
        x = x if narrow is None else x.to(narrow)
        outputs = [layer.base_layer(x) for layer in self.layers]
        weights = self.shelf.matrices(name, matrices, x.dtype)
        if any(output.dtype != x.dtype for output in outputs):  # a layer with a type of its own
            return [self.peft[i](x) for i in range(len(self.layers))]
        if silent:
            h = F.linear(x.reshape(-1, x.shape[-1]), weights.down)  # as `_Added` has it, to the bit
            for output, part, up in zip(outputs, h.split(_ranks(weights), 1), weights.ups, strict=True):
                output.flatten(0, -2).addmm_(part, up.T)
            return outputs
        # Before torch 2.14 a linear layer's output is a view: a function may not change several of them in place.
        outputs = [output.clone() if output._is_view() else output for output in outputs]
        return _Added.apply(self, weights, x, *outputs, *matrices)  # type: ignore[no-untyped-call, no-any-return]

    def _merged(self, x: Tensor, weights: Merged, matrices: Sequence[Tensor], silent: bool) -> Sequence[Tensor]:
        y = F.linear(x, weights.weight, weights.bias) if silent else _merge(self, weights, x, *matrices)
        return y.split(self.sizes, -1) if len(self.sizes) > 1 else [y]


def _ranks(weights: Matrices) -> list[int]:
    return [up.shape[1] for up in weights.ups]


@torch.compiler.disable
def _outside(group: Group, number: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A break in the compiled graph: what goes to a sink is no part of it."""
    return group._call(number, x, *args, **kwargs)


def _weight_gradients(
    group: Group, parameters: Sequence[Tensor], x: Tensor, h: Tensor, dys: Sequence[Tensor], p: Tensor
) -> list[Tensor | None]:
    """dA_1, dB_1, ... from x (rows, in), h = s x A^T and p = dy B (rows, n r), dys (rows, out_i)."""
    rank = h.shape[1] // len(dys)
    down = (p.T @ x).mul_(group.scale).split(rank)
    pairs = zip(down, [dy.T @ part for dy, part in zip(dys, h.split(rank, 1), strict=True)], strict=True)
    gradients: list[Tensor] = [gradient for pair in pairs for gradient in pair]
    return [gradient.to(parameter.dtype) for gradient, parameter in zip(gradients, parameters, strict=True)]


def _into(sink: Sink, group: Group, parameters: Sequence[Tensor], x: Tensor, h: Tensor, dys: Any, p: Tensor) -> None:
    """The same by row, x (b, ..., in), into a sink."""
    rows, rank = len(x), h.shape[1] // len(dys)
    sink.take(parameters[::2], x.reshape(rows, -1, x.shape[-1]), (p * group.scale).view(rows, -1, p.shape[1]))
    for up, part, dy in zip(parameters[1::2], h.split(rank, 1), dys, strict=True):
        sink.take([up], part.reshape(rows, -1, rank), dy.reshape(rows, -1, dy.shape[1]))


def _products(dys: Sequence[Tensor], ups: Sequence[Tensor]) -> Tensor:
    """p = dy B (rows, n r)."""
    if len(dys) == 1:
        return dys[0] @ ups[0]
    rank = ups[0].shape[1]
    p = dys[0].new_empty(len(dys[0]), rank * len(ups))
    for dy, up, part in zip(dys, ups, p.split(rank, 1), strict=True):
        torch.mm(dy, up, out=part)
    return p


class _Merged(torch.autograd.Function):
    """`x W'^T + bias`, with the gradients of what W' was made of."""

    @staticmethod
    def forward(ctx: Any, group: Group, weights: Merged, x: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.parameters, ctx.h = group, parameters, None
        ctx.save_for_backward(x, weights.weight, weights.down, *parameters[1::2])
        return F.linear(x, weights.weight, weights.bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        group, (x, weight, down, *ups) = ctx.group, ctx.saved_tensors
        flat, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        before = (dy @ weight).view_as(x) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[3]:
            return None, None, before, *[None] * len(ctx.parameters)
        dys = dy.split(group.sizes, 1)
        return None, None, before, *_gradients_of(ctx, group, x, flat, down, dys, _products(dys, ups))


_merge: Callable[..., Tensor] = _Merged.apply


class _Added(torch.autograd.Function):
    """The update `s B_i A x`, added in place to each layer's own output."""

    @staticmethod
    def forward(ctx: Any, group: Group, weights: Matrices, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        outputs, parameters = rest[: len(weights.ups)], rest[len(weights.ups) :]
        ctx.group, ctx.parameters, ctx.h = group, parameters, None
        ctx.save_for_backward(x, weights.down, *weights.ups)
        ctx.mark_dirty(*outputs)
        h = F.linear(x.reshape(-1, x.shape[-1]), weights.down)
        for output, part, up in zip(outputs, h.split(_ranks(weights), 1), weights.ups, strict=True):
            output.view(-1, output.shape[-1]).addmm_(part, up.T)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        group, (x, down, *ups) = ctx.group, ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1])
        dys = [dy.reshape(-1, dy.shape[-1]) for dy in gradients]
        p = _products(dys, ups)
        before = (p @ down).view_as(x) if ctx.needs_input_grad[2] else None
        none: list[Tensor | None] = [None] * len(ctx.parameters)
        if ctx.needs_input_grad[3 + len(ups)]:
            none = _gradients_of(ctx, group, x, flat, down, dys, p)
        return None, None, before, *gradients, *none


def _gradients_of(
    ctx: Any, group: Group, x: Tensor, flat: Tensor, down: Tensor, dys: Sequence[Tensor], p: Tensor
) -> list[Tensor | None]:
    """The matrices' gradients, or None for each where a sink has taken them."""
    h = flat @ down.T if ctx.h is None else ctx.h
    sink = group.owner.sink
    if sink is None or not sink.open():
        return _weight_gradients(group, ctx.parameters, flat, h, dys, p)
    ctx.h = h  # for the next pass over the same graph
    _into(sink, group, ctx.parameters, x, h, dys, p)
    return [None] * len(ctx.parameters)


class Fused:
    """Takes over the forwards of peft's plain LoRA layers of a network, in groups.

    Args:
        network: with the layers in it.
        layers: by full name, in the order of the network.
        active: the list of active snapshots, which the owner changes in place; one at a time, or none.

    `merging`: may weights be merged? Off where a weight is not whole (FSDP). `sink`: where weight gradients go.
    """

    def __init__(self, network: nn.Module, layers: dict[str, LoraLayer], active: list[str]) -> None:
        self.active = active
        self.sink: Sink | None = None
        self.merging = True
        self.groups: list[Group] = []
        plain = {name: layer for name, layer in layers.items() if type(layer) is PeftLinear and not layer.lora_variant}
        for names in _grouped(network, plain):
            self.groups.append(Group(self, names, [plain[name] for name in names]))

    def install(self) -> None:
        """Take the forwards over again, after `compile_blocks` has left them to the compiler."""
        for group in self.groups:
            group.install()

    def prepare(self, precision: torch.dtype, name: str = "default") -> list[Tensor]:
        """Merge now what forwards of this precision would merge: all in fp32, nothing in bf16 and fp16; the tensors
        that are kept for it (the parameters' own are not among them)."""
        tensors: list[Tensor] = []
        for group in self.groups:
            matrices = group.matrices(name)
            if group.plain and self.merging and precision == matrices[0].dtype:
                made = group.shelf.merged(name, matrices)
                tensors += [tensor for tensor in (made.weight, made.bias, made.down) if tensor is not None]
        return tensors

    def part(self, group: Group) -> None:
        """Its layers one by one from now on."""
        place = self.groups.index(group)
        pairs = zip(group.names, group.layers, strict=True)
        self.groups[place : place + 1] = [Group(self, [name], [layer]) for name, layer in pairs]

    def forget(self, *_: Any) -> None:
        """Drop what was made of the LoRAs; it is made anew when it is needed. Also an optimiser's hook."""
        for group in self.groups:
            group.shelf.forget()


def _grouped(network: nn.Module, layers: dict[str, PeftLinear]) -> list[list[str]]:
    """Names of the layers, together where they read one input and have one size of it, one rank and one scale."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, layer in layers.items():
        parent, _, inner = name.rpartition(".")
        kind = next((i for i, names in enumerate(TOGETHER) if inner in names), -1)
        # Cross-attention in the UNets has one input for q, and another for k and v.
        crossed = kind == 0 and inner == "to_q" and getattr(network.get_submodule(parent), "is_cross_attention", False)
        biased = getattr(layer.base_layer, "bias", None) is not None
        form = (layer.in_features, biased, next(iter(layer.r.values())), next(iter(layer.scaling.values())))
        key = (name, -1) if kind < 0 or crossed else (parent, kind, *form)
        groups.setdefault(key, []).append(name)  # type: ignore[arg-type]
    return list(groups.values())
