"""The training of the world's CLIP, and of the preference model: a copy of it, tuned on what biased raters prefer."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from autoencoder import pixels
from clip_building import build_clip, clip_config
from optimisers import optimisers_of
from pool import CAPTIONS, NOTHING, SIZES, Pool
from stage import Stage
from taste import taste
from texts import HEADS, targets
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from diffrl_playground.renderer import render
from diffrl_playground.taste import rated_pair

BATCH = 128
READ = 1.0  # weight of the throw-away heads' loss
PAIRS, PAIR_BATCH = 6_000, 48


def fits(stated: Tensor, truth: Tensor) -> Tensor:
    """Whether each caption (B, FACTS) is true of each image (B, FACTS): (captions, images), bool."""
    return ((stated[:, None] == truth[None]) | (stated[:, None] == NOTHING)).all(-1)


def _correct(logits: Tensor, wanted: Tensor, sizes: list[int]) -> Tensor:
    """Mean cross-entropy over the facts (B, facts) that there are; NOTHING is none."""
    losses = [
        F.cross_entropy(part, wanted[:, i], ignore_index=NOTHING, reduction="sum")
        / (1 + (wanted[:, i] != NOTHING).sum())
        for i, part in enumerate(logits.split(sizes, dim=1))
    ]
    return torch.stack(losses).mean()


def train_clip(work: Path, pool: Pool, vocabulary: int, minutes: float) -> Any:
    """Contrastive; captions are partial, so other images of which a caption is true are no negatives. Throw-away heads
    read the facts from both embeddings, which learns several times faster than the contrast alone.
    """
    torch.manual_seed(0)
    model: Any = build_clip(clip_config(vocabulary))
    width = 64
    trained = nn.ModuleDict(
        {"clip": model, "classifier": nn.Linear(width, sum(SIZES)), "text_classifier": nn.Linear(width, sum(HEADS))}
    )
    stage = Stage("clip", work, model, trained, minutes, optimisers_of(trained, 1e-3, 1e-2), fall=0.7, decay=0.99)

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(len(pool), (BATCH,), generator=generator)
        which = torch.randint(CAPTIONS, (BATCH,), generator=generator).numpy()
        rows = index.numpy()
        tokens = torch.from_numpy(pool.tokens[rows, which].astype(np.int64))
        stated, truth = (torch.from_numpy(np.array(a)) for a in (pool.stated[rows, which], pool.truth[rows]))
        # The model's own preprocessing has mean and standard deviation 0.5, that is the range [-1, 1].
        image, text, scale = model(pixels(pool, index), tokens)[:3]
        target = torch.arange(BATCH)
        also = fits(stated, truth) & ~torch.eye(BATCH, dtype=torch.bool)
        logits = (scale.clamp(max=100.0) * text @ image.T).masked_fill(also, -1e4)
        hit = (logits.argmax(dim=1) == target).float().mean().item()
        contrast = 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))
        seen = _correct(8 * trained["classifier"](image), truth.long(), SIZES)
        read = _correct(8 * trained["text_classifier"](text), targets(stated), HEADS)
        return contrast + READ * (seen + read), {"contrast": contrast.item(), "top1": hit, "seen": seen.item()}

    return stage.run(loss_of, BATCH)


def rated_pairs(tokenizer: CLIPTokenizer, count: int = PAIRS) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, 2, 64, 64, 3) uint8, tokens (N, T), and how likely a rater prefers the first (N,)."""
    rng = np.random.default_rng(1)
    images, texts, chances = [], [], []
    for _ in range(count):
        caption, scenes, chance = rated_pair(rng)
        images.append(np.stack([render(scene) for scene in scenes]))
        texts.append(caption.text())
        chances.append(chance)
    return torch.from_numpy(np.stack(images)), models.tokenize(tokenizer, texts), torch.tensor(chances).float()


def train_preference(work: Path, clip: Any, tokenizer: CLIPTokenizer, minutes: float) -> Any:
    """The copy of `clip` whose scores' difference predicts the raters' choices (Bradley and Terry 1952)."""
    torch.manual_seed(0)
    model = deepcopy(clip).train()
    images, tokens, chances = rated_pairs(tokenizer)
    stage = Stage("preference", work, model, model, minutes, optimisers_of(model, 2e-4, 2e-3), fall=0.8, decay=0.99)

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(len(images), (PAIR_BATCH,), generator=generator)
        x = images[index].flatten(0, 1).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        image, text, scale = model(x, tokens[index])[:3]
        scores = scale.clamp(max=100.0) * (image.view(PAIR_BATCH, 2, -1) * text[:, None]).sum(-1)
        loss = F.binary_cross_entropy_with_logits(scores[:, 0] - scores[:, 1], chances[index])
        likely = -(chances[index] * chances[index].log() + (1 - chances[index]) * (1 - chances[index]).log()).mean()
        return loss, {"loss": loss.item(), "best": likely.item()}

    return stage.run(loss_of, 2 * PAIR_BATCH)


def train_aesthetic(work: Path, pool: Pool, clip: Any, minutes: float) -> Any:
    """The head that predicts the synthetic taste from the CLIP's image embedding."""
    torch.manual_seed(0)
    count = min(12_288, len(pool))
    with torch.no_grad():
        parts = [
            F.normalize(clip.encode_image(pixels(pool, torch.arange(i, min(i + 256, count)))), dim=-1)
            for i in range(0, count, 256)
        ]
    features = torch.cat(parts)
    target = torch.from_numpy(taste(np.array(pool.images[:count]))).float()
    head: Any = nn.Sequential(
        nn.Linear(features.shape[1], 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1)
    )
    head[-1].bias.data.fill_(float(target.mean()))
    optimiser = torch.optim.AdamW(head.parameters(), 2e-3, betas=(0.9, 0.99), weight_decay=0.01)
    stage = Stage("aesthetic", work, head, head, minutes, [optimiser], decay=0.99)

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(count, (512,), generator=generator)
        error = F.mse_loss(head(features[index]).squeeze(1), target[index])
        return error, {"explained": 1 - error.item() / target.var().item()}

    return stage.run(loss_of, 512)
