"""A tiny embedding reward: 4 x 4 colours and bags of words, each through a fixed random matrix."""

import zlib

import torch
from torch.nn import functional as F

WIDTH = 12


class Embedder:
    name = "embedder"
    embeds = True
    differentiable = True

    def __init__(self, seed: int = 0, only: str = ""):
        self.seed, self.only = seed, only
        generator = torch.Generator().manual_seed(seed)
        self.matrix = torch.randn(48, WIDTH, generator=generator) / 7

    def applies(self, prompt, metadata):
        return self.only in prompt

    def embed_image(self, images):
        flat = F.adaptive_avg_pool2d(images, 4).flatten(1)
        return F.normalize(torch.tanh(flat @ self.matrix.to(flat)), dim=-1)

    def embed_text(self, prompts):
        return torch.stack([self._text(prompt) for prompt in prompts])

    def _text(self, prompt):
        seeds = [zlib.crc32(f"{self.seed} {word}".encode()) for word in prompt.split() or [""]]
        words = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return F.normalize(torch.stack(words).sum(0), dim=-1)

    def score(self, image_embeddings, text_embeddings):
        return (image_embeddings * text_embeddings.to(image_embeddings)).sum(-1)

    def __call__(self, images, prompts, metadata):
        return self.score(self.embed_image(images), self.embed_text(prompts))
