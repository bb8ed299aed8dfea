"""The autoencoder's training: reconstruction, with latents that tell what lies where and bear some noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from optimisers import optimisers_of
from pool import CONTENTS, PAINTS, Pool
from stage import Stage
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, RATE, MUON_RATE = 32, 2e-3, 1e-2
KL, SEMANTIC, NOISE = 2e-4, 0.02, 0.15


def pixels(pool: Pool, index: Tensor) -> Tensor:
    """Images (B, 3, 64, 64) in [-1, 1]."""
    rows = np.stack([pool.images[i] for i in index.tolist()])
    return torch.from_numpy(rows).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def classes(rows: np.ndarray, index: Tensor) -> Tensor:
    """Class numbers (B, 8, 8) of the cells."""
    return torch.from_numpy(rows[index.numpy()].astype(np.int64))


def train_autoencoder(work: Path, pool: Pool, minutes: float) -> Any:
    """Throw-away heads read from the noised latents what each cell shows, so that the latent space keeps things apart
    that look alike (a star's arm and a heart's tip); the noise makes the decoder draw clean things of unclean latents.
    """
    torch.manual_seed(0)
    vae: Any = models.build_vae()
    reader = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, CONTENTS + PAINTS, 1))
    trained = nn.ModuleDict({"vae": vae, "reader": reader})
    optimisers = optimisers_of(trained, RATE, MUON_RATE)
    stage = Stage("autoencoder", work, vae, trained, minutes, optimisers, fall=0.7, decay=0.99)

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(len(pool), (BATCH,), generator=generator)
        x = pixels(pool, index)
        posterior = vae.encode(x).latent_dist
        eps, more = torch.randn((2, *posterior.mean.shape), generator=generator)
        z = posterior.mean + posterior.std * eps + NOISE * posterior.mean.std().detach() * more
        difference = vae.decode(z).sample - x
        l1 = difference.abs().mean()
        shown = _shown(difference, classes(pool.content, index))
        kl = 0.5 * (posterior.mean.pow(2) + posterior.var - 1 - posterior.logvar).mean()
        content, paint = reader(z).split([CONTENTS, PAINTS], dim=1)
        read = F.cross_entropy(content, classes(pool.content, index)) + F.cross_entropy(
            paint, classes(pool.paint, index)
        )
        loss = l1 + difference.pow(2).mean() + shown + KL * kl + SEMANTIC * read
        return loss, {"l1": l1.item(), "kl": kl.item(), "read": read.item()}

    return stage.run(loss_of, BATCH)


def train_decoder(work: Path, pool: Pool, vae: Any, minutes: float) -> Any:
    """The decoder once more on latents that stay: the generator has learnt those. As `train_autoencoder`, no heads."""
    torch.manual_seed(0)
    vae = vae.train().to(memory_format=torch.channels_last)  # a third faster on a CPU
    vae.encoder.eval().requires_grad_(False)
    stage = Stage("decoder", work, vae, vae, minutes, optimisers_of(vae, RATE, MUON_RATE), fall=0.8, decay=0.99)

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(len(pool), (BATCH,), generator=generator)
        x = pixels(pool, index).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            z = vae.encode(x).latent_dist.mean
        z = z + NOISE * z.std() * torch.randn(z.shape, generator=generator)
        difference = vae.decode(z).sample - x
        shown = _shown(difference, classes(pool.content, index))
        l1 = difference.abs().mean()
        return l1 + difference.pow(2).mean() + shown, {"l1": l1.item(), "shown": shown.item()}

    return stage.run(loss_of, BATCH)


def _shown(difference: Tensor, content: Tensor) -> Tensor:
    """The error within what is drawn, each image counting the same however small its things are."""
    things = (content > 0).repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None]
    error = (difference.abs() + difference.pow(2)) * things
    return (error.sum((1, 2, 3)) / (3 * things.sum((1, 2, 3)) + 1)).mean()
