"""A LoRA's tensors under the names that ComfyUI reads, for the families whose names it knows.

ComfyUI does not read alpha from diffusers' metadata: without an `.alpha` beside each pair it would apply B A unscaled,
while diffusers applies alpha / r * B A. Of its names (`model_lora_keys_unet` in its `comfy/lora.py`) these are used:
`transformer.LAYER` for SD3, FLUX, Qwen-Image and HiDream, `lora_unet_LAYER` with underscores for the UNets of SD 1, 2
and SDXL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from diffrl.policy import LoraSpec

NAMES: dict[str, Callable[[str], str]] = {  # by pipeline class
    "StableDiffusion3Pipeline": lambda layer: f"transformer.{layer}",
    "FluxPipeline": lambda layer: f"transformer.{layer}",
    "QwenImagePipeline": lambda layer: f"transformer.{layer}",
    "HiDreamImagePipeline": lambda layer: f"transformer.{layer}",
    "StableDiffusionPipeline": lambda layer: "lora_unet_" + layer.replace(".", "_"),
    "StableDiffusionXLPipeline": lambda layer: "lora_unet_" + layer.replace(".", "_"),
}


def for_comfyui(family: str, state: Mapping[str, Tensor], spec: LoraSpec) -> dict[str, Tensor] | None:
    """Down (r, in), up (out, r) and alpha () of every layer, fp32; None where ComfyUI's names are not known.

    Args:
        family: the pipeline's class name.
        state: A and B as `read_lora` gives them, keyed `LAYER.lora_A.weight` and `LAYER.lora_B.weight`.
        spec: has alpha.
    """
    if family not in NAMES:
        return None
    tensors = {}
    for key, value in state.items():
        layer, _, matrix = key.removesuffix(".weight").rpartition(".")
        name = NAMES[family](layer)
        tensors[f"{name}.{'lora_down' if matrix == 'lora_A' else 'lora_up'}.weight"] = value.contiguous()
        tensors[f"{name}.alpha"] = torch.tensor(float(spec.alpha))
    return tensors
