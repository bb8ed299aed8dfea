"""LoRAs that become part of the model before anything else: what makes a model its few-step form, or one's own.

Many distilled models are not weights of their own but a LoRA (LCM, Hyper-SD, FLUX.1-Turbo, Qwen-Image-Lightning). It is
merged into the weights once, by diffusers, and costs nothing afterwards; the trained LoRA comes on top of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from diffrl.errors import UserError, in_one_line
from diffrl.loras.reading import FILE, Lora, quietly, read_lora
from diffrl.policy.lora import BASE, Adapters


def merge_lora(backbone: Any, name: str, weight: float = 1.0) -> Lora:
    """Add the LoRA to the weights of the model's network (and of its text encoders, if it is also for them), for good.

    Raises:
        UserError: there is no such LoRA, it cannot be read, or it does not fit.
    """
    try:
        read = read_lora(name, backbone)
        network, pipe = backbone.network, backbone.pipe
        config: dict[str, Any] = {"r": read.spec.rank, "lora_alpha": read.spec.alpha, "use_dora": read.spec.dora}
        config["target_modules"] = list(read.spec.targets or ())
        with quietly():
            network.load_lora_adapter(dict(read.state), prefix=None, metadata=config, adapter_name=FILE)
            if read.texts.state:
                from diffrl.loras.encoders import dress

                dress(backbone, read.texts, name)
            parts = [part for part, module in pipe.components.items() if getattr(module, "peft_config", None)]
            pipe.fuse_lora(components=parts, lora_scale=weight, safe_fusing=True)  # which refuses what is not finite
            pipe.unload_lora_weights()
    except UserError as error:
        raise UserError(f'"{name}" cannot be merged into the model: {error}') from None
    except Exception as error:  # diffusers' and peft's own, on a file that may be anybody's
        raise UserError(f'"{name}" cannot be merged into the model: {in_one_line(error)}') from None
    return read


@torch.no_grad()
def hold_base(merged: Sequence[tuple[Lora, float]], adapters: Adapters, cast_input: bool) -> None:
    """From now on the network as it was before these LoRAs became part of it is what counts as pretrained.

    It is a frozen LoRA that takes them off again, to the rounding of the merged weights: no copy of the weights, which
    may be converted or spread over processes afterwards.

    Raises:
        UserError: one of them is a DoRA, which is no sum.
    """
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for lora, weight in merged:
        if lora.spec.dora:
            raise UserError('lora.reference: "base", but a merged DoRA cannot be taken off again; use start')
        for layer in lora.spec.targets or ():
            a, b = (lora.state[f"{layer}.{matrix}.weight"] for matrix in ("lora_A", "lora_B"))
            parts.setdefault(layer, []).append((a, -weight * lora.spec.scale * b))
    rank = max(sum(len(a) for a, _ in pairs) for pairs in parts.values())
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(parts))
    with quietly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter_in_model(config, adapters.network, adapter_name=BASE)
    held: list[nn.Parameter] = []
    for name, layer in adapters.network.named_modules():
        if not isinstance(layer, LoraLayer) or BASE not in layer.lora_A:
            continue
        layer._active_adapter, layer.cast_input_dtype_enabled = adapters._active, cast_input
        for number, matrices in enumerate((layer.lora_A, layer.lora_B)):
            made: Any = matrices[BASE].float()
            value = torch.cat([pair[number] for pair in parts[name]], dim=number)
            made.weight.zero_()[tuple(slice(side) for side in value.shape)] = value.to(made.weight)
            held.append(made.weight.requires_grad_(False))
    adapters.parameters[BASE], adapters.reference = tuple(held), BASE
    for parameter in adapters.parameters["default"]:
        parameter.requires_grad_(True)
