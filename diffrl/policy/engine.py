"""Faster and smaller forms of the same computation, all of other libraries: attention kernels, compiled blocks."""

from __future__ import annotations

import logging
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from peft.tuners.lora import LoraLayer
from torch import nn

from diffrl.errors import UserError, nearest

ATTENTION = "engine.attention"
GRAPHS = 32  # of a compiled block, at most

log = logging.getLogger("diffrl")


def set_attention(network: Any, kernel: str) -> None:
    """Run attention with this kernel: "native" is torch's scaled dot product; "xformers", "flash", ... as diffusers
    names them.

    Raises:
        UserError: if there is no such kernel, it cannot run here, or this network's attention takes no kernels.
    """
    if kernel not in _kernels():
        known = f"{nearest(kernel, _kernels())}; there are {', '.join(_kernels())}"
        raise UserError(f'{ATTENTION}: "{kernel}" is not a kernel of diffusers{known}')
    processors = getattr(network, "attn_processors", {}).values()
    modern = any(hasattr(part, "_attention_backend") for part in processors)  # it takes diffusers' kernels by name
    if not modern and kernel not in ("native", "xformers"):
        name = type(network).__name__
        raise UserError(f'{ATTENTION}: "{kernel}", but {name} has older attention: native and xformers only')
    try:
        if modern:
            network.set_attention_backend(kernel)
        elif kernel == "xformers":  # older attention, SD3's and the UNets', has its own switch
            network.enable_xformers_memory_efficient_attention()
    except (ImportError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'{ATTENTION}: "{kernel}" cannot run here ({reason})') from error


def _kernels() -> list[str]:
    return [backend.value for backend in AttentionBackendName if not backend.value.startswith("_")]


def compile_blocks(network: nn.Module, **options: Any) -> int:
    """torch.compile of the network's repeated blocks, in place, when they first run; returns how many they are.

    Blocks are compiled one by one, since they are alike: the first costs its seconds, the others come from the cache.
    The LoRA snapshots are switched inside of them; each one that runs is compiled once.
    """
    kinds = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or []
    blocks = [module for module in network.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise UserError(f"engine.compile: {type(network).__name__} names no repeated blocks")
    for module in network.modules():
        if isinstance(module, LoraLayer):  # back to peft's own: the compiler fuses for itself, one graph for all blocks
            vars(module).pop("forward", None)
    # A graph for each snapshot, with and without gradient, and for each number of rows: torch's own limit of 8 is met,
    # and what is beyond it would run eager without a word.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    for block in blocks:
        block.compile(**options)
    return len(blocks)
