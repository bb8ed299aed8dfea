"""What kohya's files have beside the names of layers: an alpha for each, and text encoders named `lora_te1_...`.

diffusers keeps those alphas for its loader, which matches them by parts of names: where they differ (a LoCon's
convolutions, text encoders), layers get another one's. So each is put into its B first: B A alpha / rank is the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from diffrl.loras.names import split
from diffrl.loras.places import magnitudes

ENCODER = re.compile(r"lora_te(\d?)_(text_model_)?encoder_layers_(\d+)_(self_attn|mlp)_(\w+)")


def folded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with every alpha in its B, and CLIP's layers under their own names: `text_encoder.text_model...`.

    What stays of an alpha is the rank, which scales nothing.
    """
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
        if kind is None or (found := ENCODER.fullmatch(stem)) is None:
            state[key] = value
        elif kind != "alpha":  # the rank
            encoder = "text_encoder" + (f"_{found[1]}" if found[1] not in ("", "1") else "")
            if kind == "dora_scale":
                kind, value = "lora_magnitude_vector", magnitudes(key, value)
            state[f"{encoder}.text_model.encoder.layers.{found[3]}.{found[4]}.{found[5]}.{kind}.weight"] = value
    return state
