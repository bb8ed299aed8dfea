"""The two text encoders' training: they learn to tell what a prompt says, before the transformer learns to draw it.

A throw-away head reads every fact, said or not, from the pooled output, and where the things of a relation stand. Then
the encoders stay as they are: the transformer gets a clean description of the prompt from its first step on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from optimisers import optimisers_of
from pool import CAPTIONS, FACTS, NOTHING, SIZES, Pool
from stage import Stage
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from diffrl_playground import grammar

BATCH = 256
_SHAPE, _COLOR, _RELATION = FACTS.index("shape/1"), FACTS.index("color/1"), FACTS.index("relation")
# Unsaid is a value of its own. Then, where a relation is said: its axis, shape and colour of the near and far thing.
HEADS = [size + 1 for size in SIZES] + [3, 6, 7, 6, 7]


def targets(stated: Tensor) -> Tensor:
    """Class numbers (B, heads) of what captions say (B, FACTS)."""
    sizes = torch.tensor(SIZES)
    known = torch.where(stated == NOTHING, sizes, stated.long())
    relation = known[:, _RELATION]
    related = relation < 4
    turned = related & (
        (relation == grammar.RELATIONS.index("right of")) | (relation == grammar.RELATIONS.index("below"))
    )
    axis = torch.where(related, (relation >= 2).long(), 2)
    places = []
    for swap in (turned, ~turned):
        for slot in (_SHAPE, _COLOR):
            value = torch.where(swap, known[:, slot + 2], known[:, slot])
            places.append(torch.where(related, value, sizes[slot]))
    return torch.cat([known, torch.stack([axis, *places], dim=1)], dim=1)


class Texts(nn.Module):
    """The generator's two text encoders and the head that reads facts from their pooled outputs."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([models.build_text_encoder(tokenizer, layers) for layers in (2, 3)])
        self.classifier = nn.ModuleList([nn.Linear(models.TEXT_WIDTH, sum(HEADS)) for _ in self.encoders])

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Of each encoder, and of both together: logits (B, sum(HEADS))."""
        pooled = [encoder(tokens).text_embeds for encoder in self.encoders]
        each = [head(x) for head, x in zip(self.classifier, pooled, strict=True)]
        return [*each, each[0] + each[1]]


def train_texts(work: Path, pool: Pool, tokenizer: CLIPTokenizer, minutes: float) -> Any:
    """The trained `Texts`."""
    torch.manual_seed(0)
    model = Texts(tokenizer)
    stage = Stage("texts", work, model, model, minutes, optimisers_of(model, 1e-3, 2e-2), fall=0.7, decay=0.99)

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        rows = torch.randint(len(pool), (BATCH,), generator=generator).numpy()
        which = torch.randint(CAPTIONS, (BATCH,), generator=generator).numpy()
        tokens = torch.from_numpy(pool.tokens[rows, which].astype(np.int64))
        wanted = targets(torch.from_numpy(np.array(pool.stated[rows, which])))
        outputs = model(tokens)
        loss, right = torch.zeros(()), torch.ones(BATCH, dtype=torch.bool)
        for logits in outputs:
            for i, part in enumerate(logits.split(HEADS, dim=1)):
                loss = loss + F.cross_entropy(part, wanted[:, i])
        for i, part in enumerate(outputs[-1].split(HEADS, dim=1)):
            right &= part.argmax(1) == wanted[:, i]
        return loss / len(HEADS), {"loss": loss.item() / len(HEADS), "all": right.float().mean().item()}

    return stage.run(loss_of, BATCH)
