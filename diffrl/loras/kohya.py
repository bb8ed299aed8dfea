"""What kohya's files have beside the names of layers: an alpha for each, and text encoders named `lora_te1_...`.

diffusers keeps those alphas for its loader, which matches them by parts of names: where they differ (a LoCon's
convolutions, text encoders), layers get another one's. So each is put into its B first: B A alpha / rank is the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.loras.comfyui import split

ENCODER = re.compile(r"lora_te(\d?)_(text_model_)?encoder_layers_(\d+)_(self_attn|mlp)_(\w+)")


def encoders(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `folded` gives, with CLIP's layers under their own names: `text_encoder.text_model.encoder...`."""
    renamed = {}
    for key, value in tensors.items():
        stem, kind = split(key)
        if kind is None or (found := ENCODER.fullmatch(stem)) is None:
            renamed[key] = value
            continue
        if kind == "alpha":  # the rank
            continue
        encoder = "text_encoder" + (f"_{found[1]}" if found[1] not in ("", "1") else "")
        layer = f"{encoder}.text_model.encoder.layers.{found[3]}.{found[4]}.{found[5]}"
        if kind == "dora_scale":
            kind, value = "lora_magnitude_vector", magnitudes(key, value)
        renamed[f"{layer}.{kind}.weight"] = value
    return renamed


def folded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with every alpha in its B; what stays of it is the rank, which scales nothing."""
    alphas = {stem: value for key, value in tensors.items() for stem, kind in [split(key)] if kind == "alpha"}
    ranks = {stem: len(value) for key, value in tensors.items() for stem, kind in [split(key)] if kind == "lora_A"}
    state = {}
    for key, value in tensors.items():
        stem, kind = split(key)
        if stem in alphas and ranks.get(stem):
            if kind == "lora_B":
                value = value.float() * (float(alphas[stem]) / ranks[stem])
            elif kind == "alpha":
                value = torch.tensor(float(ranks[stem]))
        state[key] = value
    return state


def magnitudes(key: str, value: Tensor) -> Tensor:
    """A `dora_scale` as peft has its magnitudes, (out,); UserError for LyCORIS's norms over the outputs, (1, in)."""
    if not value.ndim or value.numel() != len(value):
        raise UserError(f"{key}: a DoRA whose magnitudes are of inputs, which peft has not")
    return value.reshape(-1)
