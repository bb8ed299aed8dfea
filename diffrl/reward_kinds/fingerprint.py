"""What makes a reward model this one and no other: its arguments, and the text embeddings of a few fixed prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.errors import UserError
from diffrl.rewards.protocol import Embedder, Reward, ability

# Their text embeddings are the reward model's fingerprint. Two loads of one model in other precisions agree to a cosine
# of about 0.9999; a fine-tuned model differs from the one that it came from by far more than 0.001.
PROBES = ("a photo of a dog", "a red circle on white", "an old man with a hat, oil painting", "two blue cars at night")
SAME_MODEL = 0.999
ASIDE = ("device", "batch_size", "precision")  # arguments of a reward that do not make it another one


def fingerprint(reward: Embedder) -> Tensor:
    """(P, D) text embeddings of the fixed probes, float32 on the CPU."""
    with torch.no_grad():
        return F.normalize(reward.embed_text(list(PROBES)).float().cpu(), dim=-1)


def same_model(a: Tensor, b: Tensor) -> bool:
    """Whether two fingerprints are of one reward model."""
    return a.shape == b.shape and bool(F.cosine_similarity(a, b, dim=-1).min() > SAME_MODEL)


def embedder(reward: Reward, name: str) -> Embedder:
    """`reward` itself if it embeds; else UserError."""
    if ability(reward, "embeds") is not True:
        raise UserError(f'reward "{name}" does not embed its prompts (`embeds`); clip, pickscore and hpsv2 do')
    return reward  # type: ignore[return-value]


def essential(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that make a reward what it is: not where and how it is computed."""
    return {key: value for key, value in sorted(arguments.items()) if key not in ASIDE}
