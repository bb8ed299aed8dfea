"""A LoRA's tensors under the names that ComfyUI reads.

ComfyUI does not read alpha from diffusers' metadata: without an `.alpha` beside each pair it would apply B A unscaled,
while diffusers applies alpha / r * B A. Its names (`model_lora_keys_unet` in its `comfy/lora.py`, and the maps to
diffusers' layers in `comfy/utils.py`, at 17358c8 and 09708ea) are of three kinds:

name                     families                                   ComfyUI's weight
`transformer.LAYER`      those with a map to diffusers' layers      LAYER's own, or its rows of a fused one
`lora_unet_LAYER`        UNets of SD 1, 2 and SDXL, `.` as `_`      LAYER's own
`diffusion_model.NAME`   Lumina 2: its map is Z-Image's, whose      NAME, ComfyUI's own name; q, k and v are one: their
                         fused rows are of three equal heights      A are stacked, their B stand on a diagonal
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.loras.comfyui import KREA2, LUMINA2, SD3, Z_IMAGE, weights_of
from diffrl.policy import LoraSpec

FLUX = (
    r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)|norm1(_context)?\.linear|"
    r"ff(_context)?\.(net\.0\.proj|net\.2|linear_in|linear_out))|proj_out|norm_out\.linear|context_embedder|x_embedder|"
    r"time_text_embed\.(timestep|text|guidance)_embedder\.linear_[12]|"
    r"single_transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_qkv_mlp_proj|to_out)|proj_mlp|norm\.linear|proj_out)"
)
UNET = (
    r".*\.(attn[12]\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2)|proj_in|proj_out|time_emb_proj)|(time|add)_embedding.*"
)
READ: dict[str, str] = {  # by pipeline class: diffusers' layers that ComfyUI knows; of the others it reads every one
    "StableDiffusion3Pipeline": "|".join(SD3),
    "FluxPipeline": FLUX,
    "Flux2Pipeline": FLUX,
    "Flux2KleinPipeline": FLUX,
    "ChromaPipeline": FLUX,
    "QwenImagePipeline": ".*",
    "QwenImage21Pipeline": ".*",
    "HiDreamImagePipeline": ".*",
    "Krea2Pipeline": "|".join(KREA2),
    "ZImagePipeline": "|".join(Z_IMAGE),
    "Lumina2Pipeline": "|".join(LUMINA2),
    "StableDiffusionPipeline": UNET,
    "StableDiffusionXLPipeline": UNET,
}


def for_comfyui(family: str, state: Mapping[str, Tensor], spec: LoraSpec) -> dict[str, Tensor]:
    """Down (r, in), up (out, r) and alpha () of every layer, fp32.

    Args:
        family: the pipeline's class name.
        state: A and B as `read_lora` gives them, keyed `LAYER.lora_A.weight` and `LAYER.lora_B.weight`.
        spec: has alpha.

    Raises:
        UserError: ComfyUI has no such model, or no name for a layer.
    """
    if family not in READ:
        raise UserError(f"ComfyUI's own code has no {family.removesuffix('Pipeline')}: no file for it is written")
    if any("lora_magnitude" in key for key in state):
        raise UserError("ComfyUI divides a DoRA by the norms of W, not of W + s B A: no file is written; use --merged")
    layers = list(dict.fromkeys(key.rsplit(".lora_", 1)[0] for key in state))
    if odd := [layer for layer in layers if not re.fullmatch(READ[family], layer)]:
        raise UserError(f"ComfyUI reads no LoRA of the layer {odd[0]} ({len(odd)} such layers): no file is written")
    tensors = {}
    for name, parts in _named(family, layers).items():
        down = torch.cat([state[f"{layer}.lora_A.weight"] for layer in parts])
        up = torch.block_diag(*(state[f"{layer}.lora_B.weight"] for layer in parts))
        tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"] = down.contiguous(), up.contiguous()
        tensors[f"{name}.alpha"] = torch.tensor(spec.scale * len(down))
    return tensors


def _named(family: str, layers: list[str]) -> dict[str, list[str]]:
    """The layers of each name; several where ComfyUI's weight is theirs one below the other."""
    if family in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        return {"lora_unet_" + layer.replace(".", "_"): [layer] for layer in layers}
    if family != "Lumina2Pipeline":
        return {f"transformer.{layer}": [layer] for layer in layers}
    names = {f"diffusion_model.{name}": parts for name, parts in weights_of(LUMINA2, layers).items()}
    for name, parts in names.items():
        if name.endswith(".qkv") and len(parts) != 3:
            raise UserError(f"ComfyUI has {name} as one weight, and the LoRA only {', '.join(parts)} of it")
    return names
