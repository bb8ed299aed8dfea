"""Faster and smaller forms of the same computation, all of them somebody else's: attention kernels, compiled blocks."""

from __future__ import annotations

import logging
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from diffusers.models.attention_dispatch import AttentionBackendName
from peft.tuners.lora import LoraLayer
from torch import nn

from diffrl.errors import UserError, nearest

ATTENTION = "engine.attention"

log = logging.getLogger("diffrl")


def check_launcher(accelerator: Accelerator, precision: str) -> None:
    """Say so where the launcher asks for what the config decides here; nothing of it would be used."""
    asked = accelerator.mixed_precision
    if asked not in ("no", precision):
        log.warning("accelerate's mixed_precision %s is not used; optimise.precision is %s", asked, precision)
    dynamo = accelerator.state.dynamo_plugin.backend
    if dynamo != DynamoBackend.NO:
        log.warning("accelerate's dynamo_backend %s is not used; engine.compile=true compiles the blocks", dynamo.value)


def set_attention(network: Any, kernel: str) -> None:
    """Run attention with this kernel: "native" is torch's scaled dot product; "xformers", "flash", ... as diffusers
    names them.

    Raises:
        UserError: if there is no such kernel, it cannot run here, or this network's attention takes no kernels.
    """
    known = [backend.value for backend in AttentionBackendName if not backend.value.startswith("_")]
    if kernel not in known:
        raise UserError(f'{ATTENTION}: "{kernel}" is no kernel of diffusers{nearest(kernel, known)}')
    modern = any(hasattr(part, "_attention_backend") for part in getattr(network, "attn_processors", {}).values())
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
    for block in blocks:
        block.compile(**options)
    return len(blocks)
