"""A preference model whose last layers learn while the policy does (Adv-GRPO, arXiv:2511.20256).

Shapes: B images, H x W pixels, N tokens of width W, D the width of an embedding, n pairs of a reference and an image.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.reward_kinds.learning import Learner
from diffrl_zoo.cards import card_of
from diffrl_zoo.learning_preference import Inputs, LearningPreference


class _Kept(nn.Module):
    """A layer that keeps what comes to it."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        self.hidden = hidden
        return hidden


class _Given(_Kept):
    """A layer that gives what it has, whatever comes."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.hidden


class AdversarialPreference(LearningPreference):
    """A preference model whose last layers learn while generated images score above the references: Adv-GRPO's form
    for preference models.

    After every epoch: while the epoch's images score above as many references on average, the last `layers` layers of
    the image tower take a step of Adam (betas 0.5 and 0.999) on `-log sigma(s_reference - s_image)`, at most `steps`
    times. While the references are ahead the model stays as it is. `reward`: clip, preference, pickscore or hpsv2 in
    fp32, or an own one with `image_layers` and `with_image_layers`; `references`: as in `Adversarial`. All other
    parameters are the reward's own.
    """

    name = "adversarial_preference"
    card = card_of(name)

    def __init__(
        self,
        reward: str = "preference",
        references: str = "playground",
        layers: int = 2,
        learning_rate: float = 5e-6,
        steps: int = 9,
        device: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(reward, references, steps, device, arguments)
        base: Any = self.base
        if not hasattr(base, "image_layers"):
            raise UserError(f'reward "{self.name}": "{reward}" has no `image_layers` that could learn')
        frozen, total = list(base.image_layers), len(base.image_layers)
        if not 1 <= layers <= total:
            raise UserError(f'reward "{self.name}": layers is {layers}, not from 1 to the {total} of "{reward}"')
        last = nn.ModuleList(copy.deepcopy(frozen[total - layers :])).requires_grad_(True)
        if any(parameter.dtype != torch.float32 for parameter in last.parameters()):
            raise UserError(f'reward "{self.name}": layers learn in fp32 only; give "{reward}" precision fp32')
        self.learner = Learner(last, learning_rate, betas=(0.5, 0.999))
        # The layers below are asked once for each image; what learns begins with what they said.
        self._below, self._given = _Kept(), _Given()
        self._trunk = base.with_image_layers(nn.ModuleList([*frozen[: total - layers], self._below]))
        self._now, self._then = (
            base.with_image_layers(nn.ModuleList([self._given, *part]))
            for part in (last, cast(nn.ModuleList, self.learner.first))
        )

    def scores(self, inputs: Inputs, first: bool = False) -> Tensor:
        """(B,) of what the frozen layers say of images (B, N, W), and of their texts' embeddings (B, D)."""
        hidden, texts = inputs
        self._given.hidden = hidden.to(self.learner.parameters[0].device)
        model = self._then if first else self._now
        return model.score(model.embed_image(torch.zeros(len(hidden), 3, 8, 8)), texts)  # type: ignore[no-any-return]

    @torch.no_grad()
    def inputs(self, images: Tensor, prompts: Sequence[str]) -> Inputs:
        """What the frozen layers say of images (B, 3, H, W), in main memory, and the texts' embeddings."""
        self._trunk.embed_image(images)
        return self._below.hidden.float().cpu(), self.base.embed_text(prompts)

    def overtaken(self, gap: Tensor, mean: float) -> Tensor:
        """All pairs while the images score above the references, else none."""
        return torch.full_like(gap, mean < 0, dtype=torch.bool)
