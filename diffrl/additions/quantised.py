"""The frozen network's weights in fewer bits (`engine.base`); the LoRA and the arithmetic stay as they are.

| base | bytes a weight | rounding | by |
| --- | --- | --- | --- |
| int8 | 1 | 255 even steps, one scale for each output | plain torch; equal to the bit to torchao's weight-only int8 |
| fp8 | 1 | e4m3, one scale for each output | plain torch; equal to the bit to torchao's weight-only float8 |
| nf4 | 0.5625 | 16 quantiles of a normal distribution, a scale for 64 weights (QLoRA, 2305.14314) | bitsandbytes |

Products are computed in the type that they had: the weight is made full for the moment of the product, forward and
backward, and nothing of its size is kept for the backward pass. So a layer's gradient is exactly that of a layer with
the dequantised weight.

Converted are the linear layers of the repeated blocks, which have nearly all of the weights; embeddings, the last
projection, norms and biases stay. It comes after a LoRA that is merged into the model, and after the trained LoRA was
put in: peft sees a plain layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffrl.errors import UserError

BLOCK = 64  # weights of nf4 with one scale: bitsandbytes' own default


class Quantised(nn.Module):
    """A frozen linear layer, x (..., in) -> (..., out), whose weight is kept as `codes` and `scales`.

    Args:
        layer: the plain one.
        base: "int8", "fp8" or "nf4".
        device: where it is converted, and stays; None: where it is.

    It may be moved to another device, but not cast to another type.
    """

    def __init__(self, layer: nn.Linear, base: str, device: torch.device | None = None) -> None:
        super().__init__()
        weight = layer.weight.detach().to(device)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.base, self._dtype = base, weight.dtype
        codes, scales = _without_values(base, weight.shape, weight.dtype) if weight.is_meta else ROUND[base](weight)
        self.codes, self.scales = (nn.Parameter(part, requires_grad=False) for part in (codes, scales))
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The weight (out, in) that it computes with, made anew each time."""
        if self.base == "nf4":
            shape = torch.Size((self.out_features, self.in_features))
            return _from_nf4(self.codes, self.scales, shape, self._dtype)
        return self.codes.to(self._dtype).mul_(self.scales)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.requires_grad and torch.is_grad_enabled():
            return _product(x, self)
        return F.linear(x.detach(), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, base={self.base}"


class _Product(torch.autograd.Function):
    """`x W^T + bias`, of which nothing is saved: W is made again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Quantised) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        return F.linear(x.detach(), layer.weight, layer.bias)  # as without gradient, to the bit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy @ ctx.layer.weight, None


_product: Callable[..., Tensor] = _Product.apply


def quantise(network: nn.Module, base: str, device: torch.device | None = None) -> None:
    """Convert the linear layers of the network's blocks to `base`, in place and one by one.

    So a device never holds more than what is converted and one layer. Modules on the meta device get what the real ones
    would have, without values.

    Args:
        network: the frozen denoiser, its LoRA already in it, which is left alone.
        base: "int8", "fp8" or "nf4".
        device: where the converted layers go; the others stay where they are. None: all stay.

    Raises:
        UserError: its library is missing, or this network is not converted.
    """
    kind = type(network).__name__
    if kind.startswith("UNet"):
        raise UserError(f'engine.base: "{base}", but {kind} is mostly convolutions, which stay full; use full')
    names = block_layers(network)
    if not names:
        raise UserError(f'engine.base: "{base}", but {kind} has no lists of blocks with linear layers; use full')
    for name in names:
        parent, _, own = name.rpartition(".")
        layer: Any = network.get_submodule(name)
        setattr(network.get_submodule(parent), own, Quantised(layer, base, device))


def block_layers(network: nn.Module) -> list[str]:
    """Full names of the plain linear layers in the network's lists of modules, without those of LoRAs."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    inside = {part for blocks in lists for part in blocks.modules()}
    layers = [name for name, part in network.named_modules() if type(part) is nn.Linear and part in inside]
    return [name for name in layers if ".lora_" not in name]


@functools.lru_cache(maxsize=64)  # a network has few shapes of weights and many weights
def _without_values(base: str, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """On the meta device."""
    return ROUND[base](torch.empty(shape, dtype=dtype, device="meta"))


# ---- the formats: weight (out, in) -> codes, scales


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = _scales(weight, 127.5)
    codes = (weight.float() * (1 / scales.float())).round_().clamp_(-128, 127)
    return codes.to(torch.int8), scales


def _to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = _scales(weight, largest)
    return (weight.float() / scales.float()).clamp_(-largest, largest).to(torch.float8_e4m3fn), scales


def _scales(weight: Tensor, largest: float) -> Tensor:
    """(out, 1), in the weight's type, so that a dequantised weight is rounded once. A row of zeros stays one."""
    scales = (weight.float().abs().amax(1, keepdim=True) / largest).to(weight.dtype)
    return scales.clamp_min_(torch.finfo(weight.dtype).tiny)


def _to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, state = _bitsandbytes().quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return codes, state.absmax


def _from_nf4(codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    library = _bitsandbytes()
    state = library.QuantState(scales, shape=shape, dtype=dtype, blocksize=BLOCK, quant_type="nf4")
    made: Tensor = library.dequantize_4bit(codes, state)
    return made


def _bitsandbytes() -> Any:
    """Its functions; UserError if it is not installed."""
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it misses a CPU kernel that nothing here calls
        import bitsandbytes.functional
    except ImportError as error:
        raise UserError(f'engine.base: "nf4" needs bitsandbytes ({error}): pip install "diffrl[8bit]"') from None
    return bitsandbytes.functional


ROUND: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"int8": _to_int8, "fp8": _to_fp8, "nf4": _to_nf4}
