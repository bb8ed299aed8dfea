"""Rewards that cost nothing, for measuring everything else: `file.py:Patch` and, for D2-Align, `file.py:Embedder`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.seeds import generator


class Patch:
    """A random weighting of the image's 4 x 4 colours."""

    name = "patch"

    def __init__(self, number: int = 0) -> None:
        self.weight = torch.randn(48, generator=generator("patch", number))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        return F.adaptive_avg_pool2d(images, 4).flatten(1) @ self.weight.to(images)


class Embedder:
    """The same colours through a random matrix, against a random vector of the prompt."""

    name = "embedder"
    embeds = True
    differentiable = True
    width = 12

    def __init__(self) -> None:
        self.matrix = torch.randn(48, self.width, generator=generator("embedder")) / 7

    def embed_image(self, images: Tensor) -> Tensor:
        flat = F.adaptive_avg_pool2d(images, 4).flatten(1)
        return F.normalize(torch.tanh(flat @ self.matrix.to(flat)), dim=-1)

    def embed_text(self, prompts: Sequence[str]) -> Tensor:
        rows = [torch.randn(self.width, generator=generator("text", prompt)) for prompt in prompts]
        return F.normalize(torch.stack(rows), dim=-1)

    def score(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        return (image_embeddings * text_embeddings.to(image_embeddings)).sum(-1)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        return self.score(self.embed_image(images), self.embed_text(prompts))
