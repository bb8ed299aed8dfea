"""The shipped values of `engine.base`, without torch: what each does not go with, and how it converts a network."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


class Base:
    """An entry point of the group `diffrl.bases` names such an object, or a function that converts."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, network: nn.Module, device: torch.device | None = None) -> None:
        """Convert the frozen network in place, see `diffrl.additions.quantised`."""
        from diffrl.additions.quantised import quantise

        quantise(network, self.name, device)

    def refusal(self, precision: str, device: str) -> str:
        """Why not with this `optimise.precision`, or on this type of device ("": not known yet); "" where it works."""
        if device == "mps" and self.name != "int8":
            return f'"{self.name}" is not available on an Apple device (MPS); use int8'
        if self.name == "fp8" and precision == "fp16":
            return '"fp8" with optimise.precision: fp16: not tried together; use bf16, or int8'
        if self.name == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            return '"nf4" needs bitsandbytes: pip install "diffrl[8bit]"'
        return ""


INT8, FP8, NF4 = map(Base, ("int8", "fp8", "nf4"))
