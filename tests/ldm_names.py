"""Stable Diffusion 1 and XL as they were published: a pipeline's tensors under the original names, in one file."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

TOP = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
AUTOENCODER = {
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0.group_norm": "mid.attn_1.norm",
    "mid_block.attentions.0.to_out.0": "mid.attn_1.proj_out",
    "mid_block.attentions.0.to_": "mid.attn_1.",
}
TEXTS = {
    "text_projection.weight": "text_projection",
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.": "ln_final.",
    "encoder.layers.": "transformer.resblocks.",
    ".layer_norm": ".ln_",
    ".mlp.fc1.": ".mlp.c_fc.",
    ".mlp.fc2.": ".mlp.c_proj.",
    ".self_attn.": ".attn.",
}


def original(pipe: Any) -> dict[str, Tensor]:
    """The pipeline's tensors; its UNet and autoencoder have two blocks, of one layer each."""
    found = {f"model.diffusion_model.{_unet(key)}": value for key, value in pipe.unet.state_dict().items()}
    for key, value in pipe.vae.state_dict().items():
        name = _autoencoder(key)
        convolution = re.search(r"attn_1\.(q|k|v|proj_out)\.weight", name)
        found[f"first_stage_model.{name}"] = value[:, :, None, None] if convolution else value
    first = (
        "cond_stage_model.transformer."
        if not hasattr(pipe, "text_encoder_2")
        else "conditioner.embedders.0.transformer."
    )
    found |= {first + key: value for key, value in _clip(pipe.text_encoder).items()}
    if hasattr(pipe, "text_encoder_2"):
        found |= {
            f"conditioner.embedders.1.model.{key}": value for key, value in _open_clip(pipe.text_encoder_2).items()
        }
    return {key: value.detach().clone().contiguous() for key, value in found.items()}


def _renamed(key: str, names: dict[str, str]) -> str:
    for here, there in names.items():
        key = key.replace(here, there)
    return key


def _unet(key: str) -> str:
    part = next((here for here in TOP if key.startswith(f"{here}.")), None)
    if part is not None:
        return TOP[part] + key.removeprefix(part)
    side, block, kind, layer, rest = re.fullmatch(r"(\w+?)_blocks?\.(?:(\d)\.)?(\w+)\.(\d)\.(.*)", key).groups()
    rest = _renamed(rest, RESNET) if kind == "resnets" else rest
    number = 2 * int(block or 0) + int(layer)
    if side == "mid":
        return f"middle_block.{2 * int(layer) if kind == 'resnets' else 1}.{rest}"
    if kind == "downsamplers":
        return f"input_blocks.{number + 2}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":  # behind the attention, which the first block has
        return f"output_blocks.{number + 1}.2.{rest}"
    place = 0 if kind == "resnets" else 1
    return f"input_blocks.{number + 1}.{place}.{rest}" if side == "down" else f"output_blocks.{number}.{place}.{rest}"


def _autoencoder(key: str) -> str:
    key = re.sub(r"(down|up)_blocks\.(\d)\.(down|up)samplers\.0", r"\1.\2.\3sample", _renamed(key, AUTOENCODER))
    key = re.sub(r"(down|up)_blocks\.(\d)\.resnets", r"\1.\2.block", key)
    return re.sub(r"decoder\.up\.(\d)", lambda found: f"decoder.up.{1 - int(found[1])}", key)  # counted from the image


def _clip(encoder: Any) -> dict[str, Tensor]:
    """As transformers had it for years, with `text_model` around it."""
    state = {key: value for key, value in encoder.state_dict().items() if value.is_floating_point()}
    return {f"text_model.{key.removeprefix('text_model.')}": value for key, value in state.items()}


def _open_clip(encoder: Any) -> dict[str, Tensor]:
    found, state = {}, _clip(encoder)
    for key, value in state.items():
        name = _renamed(key.removeprefix("text_model."), TEXTS)
        if part := re.search(r"\.([qkv])_proj\.(weight|bias)", key):
            three = [state[key.replace(f".{part[1]}_proj.", f".{one}_proj.")] for one in "qkv"]
            name, value = name.replace(part[0], f".in_proj_{part[2]}"), torch.cat(three)
        found[name] = value.T if name == "text_projection" else value
    return found
