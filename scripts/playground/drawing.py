"""The transformer's training: flow matching on the pool's latents; heads make a middle layer know the picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from autoencoder import pixels
from optimisers import optimisers_of
from pool import CONTENTS, KINDS, PAINTS, Pool
from stage import Stage
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from diffrl.playground import models

BATCH = 128
RATE, MUON_RATE = 1.5e-3, 2e-2
LAYER = 2  # the block whose output they read, counted from 1
NOISIER = 0.4  # mean of the logit of the noise level
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of the transformer and the frozen encoders
EMPTY = 0.1  # share of prompts that are emptied, for classifier-free guidance
SIMPLE = [KINDS.index(kind) for kind in ("objects", "heads", "words")]  # kinds that show one thing


@dataclass(frozen=True)
class Design:
    """What can be chosen; the defaults are the shipped model's.

    patch: latents a side of a token, 2 (16 tokens) or 1 (64). heads: of 32 channels. read: weight of the loss of the
    throw-away heads. muon: for the matrices inside, else AdamW for all. bf16: autocast to it, which is worth it on
    machines that have units for it. simple: the share of the time in which only scenes of one thing are shown.
    """

    patch: int = 2
    heads: int = 4
    layers: int = 4
    read: float = 0.3
    muon: bool = True
    bf16: bool = False
    simple: float = 0.0


@torch.no_grad()
def encode_pool(work: Path, pool: Pool, vae: Any, part: int = 0, parts: int = 1) -> None:
    """Write latents (N, 8, 8, 8) of one part of the pool, as float16, into the file that all parts share."""
    path = work / f"latents-{part}-of-{parts}.npy"
    rows = np.array_split(np.arange(len(pool)), parts)[part]
    out = np.zeros((len(rows), 8, 8, 8), np.float16)
    vae = vae.to(memory_format=torch.channels_last)  # a third faster on a CPU
    for start in range(0, len(rows), 128):
        index = torch.from_numpy(rows[start : start + 128])
        out[start : start + len(index)] = vae.encode(
            pixels(pool, index).contiguous(memory_format=torch.channels_last)
        ).latent_dist.mean.numpy()
    np.save(path, out)


class Learner(nn.Module):
    """The transformer, and what is thrown away: a head that reads the cells' classes from the image tokens inside."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        transformer: Any = models.build_transformer(design.layers, design.heads, patch=design.patch)
        self.transformer = transformer
        width, patch = transformer.inner_dim, transformer.config.patch_size
        self.classifier = nn.Sequential(
            nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, (CONTENTS + PAINTS) * patch**2)
        )
        self.inside: list[Tensor] = []
        block = transformer.transformer_blocks[LAYER - 1]
        block.register_forward_hook(lambda module, given, found: self.inside.append(found[1]))

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
    work: Path, pool: Pool, latents: np.ndarray, prompts: Prompts, minutes: float, name: str = "generator",
    start: Any = None, fall: float = 0.7, compiled: bool = False, rate: float = 1.0, design: Design | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Any:  # fmt: skip
    """The trained transformer (averaged). `latents`: (N, 8, 8, 8), mean 0 and deviation 1. `start`: weights.

    `compiled`: torch.compile it first, which takes minutes and makes a step a quarter shorter. `rate`: factor of the
    learning rates; a small one only bends the weights of the start, and the average is shorter. `clock`: of `minutes`.
    """
    torch.manual_seed(0)
    design = design or Design()
    learner = Learner(design).to(DEVICE)
    if start is not None:
        learner.transformer.load_state_dict(start)
    optimisers = optimisers_of(learner, rate * RATE, rate * MUON_RATE if design.muon else None)
    every = np.arange(len(pool))
    one_thing = np.flatnonzero(np.isin(np.asarray(pool.kinds), SIMPLE))
    decay = 0.999 if rate == 1 else 0.99
    stage = Stage(name, work, learner.transformer, learner, minutes, optimisers, fall, decay, clock)
    if compiled:  # after the stage has copied it for the average
        learner.transformer.forward = torch.compile(learner.transformer.forward, dynamic=False)

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        among = one_thing if done < design.simple else every
        rows = among[torch.randint(len(among), (BATCH,), generator=generator).numpy()]
        x0 = torch.from_numpy(latents[rows].astype(np.float32))
        t = torch.sigmoid(torch.randn(BATCH, generator=generator) + NOISIER)
        eps = torch.randn(x0.shape, generator=generator)
        x0, t, eps = (tensor.to(DEVICE, non_blocking=True) for tensor in (x0, t, eps))
        level = t[:, None, None, None]
        embedded = prompts.embed(rows, generator)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=design.bf16):
            velocity, read = learner((1 - level) * x0 + level * eps, t, *embedded)
        velocity, read = velocity.float(), read.float()
        content, paint = (torch.from_numpy(a[rows].astype(np.int64)).to(DEVICE) for a in (pool.content, pool.paint))
        logits = read.split([CONTENTS, PAINTS], dim=1)
        known = F.cross_entropy(logits[0], content) + F.cross_entropy(logits[1], paint)
        error = F.mse_loss(velocity, eps - x0)
        return error + design.read * known, {"v": error.item(), "read": known.item()}

    return stage.run(loss_of, BATCH).cpu()
