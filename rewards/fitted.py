"""A reward of one's own preferences: a head that `diffrl rewards fit` trained, on another reward's embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from diffrl.memory.footprint import footprint
from diffrl.reward_tools.head import load_head
from diffrl.rewards.protocol import Embedder, ability
from diffrl_zoo.cards import card_of
from diffrl_zoo.loading import inner


class Fitted:
    """Bradley-Terry scores, in logits, that a head predicts from the embeddings of image and prompt.

    `head`: the file that `diffrl rewards fit` wrote; it names the reward whose embeddings it is on, with its arguments.
    `device`, `batch_size`: that reward's own.
    """

    name = "fitted"
    differentiable = True
    card = card_of(name)

    def __init__(self, head: str, device: str | None = None, batch_size: int = 64) -> None:
        self.head = load_head(head)
        self.base = cast(Embedder, inner(self.head.reward, device, self.head.arguments))
        self.head.check(self.base, head)
        self.batch_size, self.device = batch_size, ability(self.base, "device")
        accuracy = self.head.figures.get("accuracy")
        known = f"; {accuracy:.0%} of held-out pairs right" if isinstance(accuracy, float) else ""
        self.card = replace(type(self).card, measures=f"{type(self).card.measures} (on {self.head.reward}{known})")

    @staticmethod
    def wrapped(head: str, **_: Any) -> tuple[str, Mapping[str, Any]]:
        """The reward whose embeddings the head reads, and its parameters."""
        fitted = load_head(head)
        return fitted.reward, fitted.arguments

    @staticmethod
    def footprint(head: str, **_: Any) -> int | None:
        """Bytes of the weights of the reward whose embeddings the head reads."""
        return footprint(*Fitted.wrapped(head))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]; gradients flow to the images."""
        with torch.no_grad():
            text = self.base.embed_text(prompts)
        return self.head(self.base.embed_image(images), text)
