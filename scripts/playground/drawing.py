"""The transformer's training: flow matching on the pool's latents; heads make a middle layer know the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from autoencoder import pixels
from optimisers import optimisers_of
from pool import CONTENTS, KINDS, PAINTS, Pool
from stage import Stage
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

BATCH = 128
RATE, MUON_RATE = 1.5e-3, 2e-2
LAYER = 2  # the block whose output they read, counted from 1
NOISIER = 0.4  # mean of the logit of the noise level
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of the transformer and the frozen encoders
READ = 0.3  # weight of the loss of the throw-away heads
EMPTY = 0.1  # share of prompts that are emptied, for classifier-free guidance


@torch.no_grad()
def encode_pool(pool: Pool, vae: Any) -> np.ndarray:
    """Latents (N, 8, 8, 8) of the pool, float16."""
    vae = vae.to(memory_format=torch.channels_last)  # a third faster on a CPU
    parts = []
    for index in torch.arange(len(pool)).split(128):
        x = pixels(pool, index).contiguous(memory_format=torch.channels_last)
        parts.append(vae.encode(x).latent_dist.mean.numpy().astype(np.float16))
    return np.concatenate(parts)


class Learner(nn.Module):
    """The transformer, and what is thrown away: a head that reads the cells' classes from the image tokens inside."""

    def __init__(self) -> None:
        super().__init__()
        transformer: Any = models.build_transformer()
        self.transformer = transformer
        width, patch = transformer.inner_dim, transformer.config.patch_size
        self.classifier = nn.Sequential(
            nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, (CONTENTS + PAINTS) * patch**2)
        )
        self.inside: list[Tensor] = []
        block = transformer.transformer_blocks[LAYER - 1]
        block.register_forward_hook(lambda module, given, output: self.inside.append(output[1]))

    def forward(self, x_t: Tensor, t: Tensor, embeds: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity (B, 8, 8, 8) and the classes' logits (B, CONTENTS + PAINTS, 8, 8)."""
        self.inside.clear()
        velocity = models.velocity(self.transformer, x_t, t, embeds, pooled)
        read = self.classifier(self.inside.pop())  # (B, tokens, classes * patch**2)
        patch = self.transformer.config.patch_size
        side = 8 // patch
        read = read.view(-1, side, side, patch, patch, CONTENTS + PAINTS).permute(0, 5, 1, 3, 2, 4)
        return velocity, read.reshape(-1, CONTENTS + PAINTS, 8, 8)


class Prompts:
    """Batches of captions and their embeddings by the frozen encoders."""

    def __init__(self, pool: Pool, texts: Any, tokenizer: CLIPTokenizer, wrong: float = 0.0) -> None:
        """`wrong`: share of scenes whose caption is that of another scene of the same kind."""
        self.tokens, self.wrong = pool.tokens, wrong
        self.kinds = np.asarray(pool.kinds)
        self.of_kind = [np.flatnonzero(self.kinds == kind) for kind in range(len(KINDS))] if wrong else []
        self.encoders = texts.encoders.eval().requires_grad_(False).to(DEVICE)
        self.empty = models.tokenize(tokenizer, [""])

    def others(self, rows: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """`rows`, a share `wrong` of them replaced by other scenes of the same kind."""
        chance, place = torch.rand(2, len(rows), generator=generator, dtype=torch.float64).numpy()
        of_kind = [self.of_kind[kind] for kind in self.kinds[rows]]
        drawn = [scenes[int(u * len(scenes))] for scenes, u in zip(of_kind, place, strict=True)]
        return np.where(chance < self.wrong, drawn, rows)

    @torch.no_grad()
    def embed(self, rows: np.ndarray, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Embeddings (B, T, 2 * width) and pooled (B, 2 * width) of one of each scene's captions."""
        which = torch.randint(self.tokens.shape[1], (len(rows),), generator=generator).numpy()
        if self.wrong:
            rows = self.others(rows, generator)
        tokens = torch.from_numpy(self.tokens[rows, which].astype(np.int64))
        tokens = torch.where(torch.rand(len(rows), 1, generator=generator) < EMPTY, self.empty, tokens)
        tokens = tokens.to(DEVICE, non_blocking=True)
        outputs = [encoder(tokens, output_hidden_states=True) for encoder in self.encoders]
        embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return embeds, torch.cat([output.text_embeds for output in outputs], dim=-1)


def train_drawing(
    work: Path, pool: Pool, latents: np.ndarray, prompts: Prompts, minutes: float, start: Any = None,
    compiled: bool = False, rate: float = 1.0,
) -> Any:  # fmt: skip
    """The trained transformer (averaged). `latents`: (N, 8, 8, 8), mean 0 and deviation 1. `start`: weights.

    `compiled`: torch.compile it first, which takes minutes and makes a step a quarter shorter. `rate`: factor of the
    learning rates; a small one only bends the weights of the start, and the average is shorter.
    """
    torch.manual_seed(0)
    learner = Learner().to(DEVICE)
    if start is not None:
        learner.transformer.load_state_dict(start)
    optimisers = optimisers_of(learner, rate * RATE, rate * MUON_RATE)
    decay = 0.999 if rate == 1 else 0.99
    stage = Stage("generator", work, learner.transformer, learner, minutes, optimisers, fall=0.7, decay=decay)
    if compiled:  # after the stage has copied it for the average
        learner.transformer.forward = torch.compile(learner.transformer.forward, dynamic=False)

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        rows = torch.randint(len(pool), (BATCH,), generator=generator).numpy()
        x0 = torch.from_numpy(latents[rows].astype(np.float32))
        t = torch.sigmoid(torch.randn(BATCH, generator=generator) + NOISIER)
        eps = torch.randn(x0.shape, generator=generator)
        x0, t, eps = (tensor.to(DEVICE, non_blocking=True) for tensor in (x0, t, eps))
        level = t[:, None, None, None]
        embedded = prompts.embed(rows, generator)
        velocity, read = learner((1 - level) * x0 + level * eps, t, *embedded)
        content, paint = (torch.from_numpy(a[rows].astype(np.int64)).to(DEVICE) for a in (pool.content, pool.paint))
        logits = read.split([CONTENTS, PAINTS], dim=1)
        known = F.cross_entropy(logits[0], content) + F.cross_entropy(logits[1], paint)
        error = F.mse_loss(velocity, eps - x0)
        return error + READ * known, {"v": error.item(), "read": known.item()}

    return stage.run(loss_of, BATCH).cpu()
