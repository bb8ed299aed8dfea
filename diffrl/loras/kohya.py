"""What files have beside a network's own names: kohya's alphas and text encoders, and names that diffusers converts.

diffusers keeps alphas for its loader, which matches them by parts of names: where they differ (a LoCon's
convolutions, text encoders), layers get another one's. So each is put into its B first: B A alpha / rank is the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
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


def converted(tensors: dict[str, Tensor], backbone: Any) -> dict[str, Tensor]:
    """What the pipeline's own converter makes of them.

    Each matrix is sent through as a number of its own first: the converter drops what it does not know.

    Raises:
        UserError: a matrix is nowhere in what it gives.
    """
    words: dict[str, Any] = {"unet_config": backbone.network.config} if backbone.denoiser == "unet" else {}
    if "return_alphas" in type(backbone.pipe).lora_state_dict.__code__.co_varnames:
        words["return_alphas"] = True
    convert = partial(type(backbone.pipe).lora_state_dict, return_lora_metadata=True, **words)
    numbers = {key: float(number) for number, key in enumerate(tensors, 1) if split(key)[1] != "alpha"}
    marked = {key: torch.full(value.shape, numbers[key]) for key, value in tensors.items() if key in numbers}
    seen = set[float]()
    for value in convert({key: marked.get(key, value.clone()) for key, value in tensors.items()})[0].values():
        if isinstance(value, Tensor) and value.ndim > 1:
            seen |= {*value.flatten(1)[:, 0].tolist(), *value.flatten(1)[0].tolist()}
    if lost := [key for key, number in numbers.items() if number not in seen]:
        text = f"{len(lost)} of its {len(tensors)} tensors have no place in {type(backbone.network).__name__}"
        raise UserError(f"{text}, beginning with {lost[0]}: is it of another model?")
    return dict(convert(tensors)[0])
