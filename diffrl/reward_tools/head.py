"""A head on the frozen embeddings of a reward, which `diffrl rewards fit` trains on preferences.

    r(x, c) = w . f(x, c) + b,   f = [e_img, e_img * e_txt]            e: unit vectors (D,) of image and prompt

The second half knows the prompt (its weights all equal: CLIP's cosine), the first one what is liked with any.
Scores are logits: sigma(r(x, c) - r(y, c)) is the chance that x is preferred to y.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diffrl.errors import UserError
from diffrl.records.disk import replacing
from diffrl.reward_kinds.fingerprint import fingerprint, same_model
from diffrl.rewards.protocol import Embedder

KEY = "diffrl.head"


def features(image: Tensor, text: Tensor) -> Tensor:
    """f (B, 2 D) of embeddings (B, D) of images and their prompts."""
    return torch.cat([image, image * text], dim=-1)


@dataclass(frozen=True)
class Head:
    """`weight` (2 D,), `bias` (): float32. `reward`, `arguments`: whose embeddings it is on, with their fingerprint
    `probes`. `figures`: what was measured when it was fitted."""

    weight: Tensor
    bias: Tensor
    probes: Tensor
    reward: str
    arguments: Mapping[str, Any]
    figures: Mapping[str, Any]

    def __call__(self, image: Tensor, text: Tensor) -> Tensor:
        """r (B,)."""
        return features(image, text) @ self.weight.to(image) + self.bias.to(image)

    def check(self, base: Embedder, path: str) -> None:
        """UserError if it was fitted on another model's embeddings."""
        probes = fingerprint(base)
        if probes.shape != self.probes.shape or not same_model(probes, self.probes):
            raise UserError(f'fitted: {path} was fitted on another model than this "{self.reward}"')


def save_head(head: Head, path: Path) -> None:
    """Write it as safetensors. Raises DiskError."""
    tensors = {"weight": head.weight, "bias": head.bias, "probes": head.probes}
    metadata = {"reward": head.reward, "arguments": dict(head.arguments), "figures": dict(head.figures)}
    with replacing(path) as temporary:
        temporary.write_bytes(save({k: v.contiguous() for k, v in tensors.items()}, {KEY: json.dumps(metadata)}))


def load_head(path: str) -> Head:
    """UserError for what is not a head that `diffrl rewards fit` wrote."""
    if not Path(path).is_file():
        raise UserError(f'fitted: no file "{path}"; `diffrl rewards fit SET --out {path}` writes one')
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in ("weight", "bias", "probes")}
        head = Head(**tensors, **{name: metadata[name] for name in ("reward", "arguments", "figures")})
        if head.weight.ndim != 1 or head.bias.ndim != 0 or not isinstance(head.arguments, dict):
            raise ValueError("tensors or arguments of another form")
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"fitted: {path} is not a head that `diffrl rewards fit` wrote") from error
    return head
