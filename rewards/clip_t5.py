"""CLIP-FlanT5's own class: a T5 whose encoder reads an image's patches in the middle of a text (arXiv:2404.01291).

Its state dict has T5's names, `vision_tower.vision_tower.*` (transformers' CLIP) and `mm_projector.*` (linear layers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, T5Config, T5ForConditionalGeneration


class ClipT5(T5ForConditionalGeneration):
    """`config`: the checkpoint's, as a `T5Config`, with `vision`, the image encoder's."""

    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"position_ids$"]  # noqa: RUF012 - transformers' own form

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        settings: Any = config
        vision = CLIPVisionConfig(**settings.vision)
        self.vision_tower: Any = nn.ModuleDict({"vision_tower": CLIPVisionModel(vision)})  # as the checkpoint names it
        self.layer: int = settings.mm_vision_select_layer
        depth = int(settings.mm_projector_type.removeprefix("mlp").removesuffix("x_gelu"))
        width = config.d_model
        layers: list[nn.Module] = [nn.Linear(vision.hidden_size, width)]
        for _ in range(1, depth):
            layers += [nn.GELU(), nn.Linear(width, width)]
        self.mm_projector = nn.Sequential(*layers)
        self.post_init()

    def see(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) to the patches' embeddings (B, P, d_model), for the encoder."""
        states = self.vision_tower.vision_tower(pixel_values=pixels, output_hidden_states=True).hidden_states
        return self.mm_projector(states[self.layer][:, 1:])

    def answer(self, before: Tensor, pixels: Tensor, after: list[Tensor], wanted: Tensor) -> Tensor:
        """Log-probabilities (B, A) of the answer `wanted` (A,) after the words `before` (L,), image and `after`."""
        embed = self.get_input_embeddings()
        images = self.see(pixels)
        first = embed(before).expand(len(images), -1, -1)
        length = max(map(len, after))
        words = images.new_zeros(len(images), length, images.shape[-1])
        mask = torch.ones(len(images), first.shape[1] + images.shape[1] + length, device=images.device)
        for row, tokens in enumerate(after):
            words[row, : len(tokens)] = embed(tokens)
            mask[row, mask.shape[1] - length + len(tokens) :] = 0.0
        logits = self(
            inputs_embeds=torch.cat([first, images, words], dim=1),
            attention_mask=mask,
            labels=wanted.repeat(len(images), 1),
            use_cache=False,
        ).logits
        return logits.float().log_softmax(dim=-1).gather(2, wanted.expand(len(images), -1)[..., None])[..., 0]
