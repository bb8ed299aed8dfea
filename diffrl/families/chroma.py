"""Chroma: FLUX.1's form without a pooled embedding, with true classifier-free guidance and a mask over the text.

diffusers adds its mask of ones and zeros to the attention's scores, it masks nothing: padding is damped by a factor of
e. That is what its pipeline draws with, so it is what is trained here; the padding cannot be cut off.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_chroma import ChromaSingleTransformerBlock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffrl.families.family import Family, Known
from diffrl.families.latents import pack, unpack
from diffrl.policy.conditioning import Conditioning


class Chroma(Family):
    """The family's part of a policy (see `diffrl.families.family`)."""

    longest_text = 512
    known = (Known("lodestones/Chroma1-HD", 35, 5.0),)
    restrictions = ("padding is damped and not masked, as in diffusers, so texts keep their full length",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.mask: Tensor | None = None  # (B, text + image tokens) of the forward that runs
        enable = self.network.enable_gradient_checkpointing
        self.network.enable_gradient_checkpointing = partial(enable, self.recomputed)
        self.network.time_text_embed.guidance_proj.register_forward_hook(self.sent)

    def recomputed(self, block: nn.Module, *inputs: Any) -> Any:
        """Checkpointed call of a block. diffusers 0.42 leaves the mask out of a checkpointed single block's inputs."""
        if isinstance(block, ChromaSingleTransformerBlock) and len(inputs) == 3:  # states, modulation, rotation
            inputs = (*inputs, self.mask)  # as an input: by the backward pass another forward may have its own mask
        return checkpoint(block.__call__, *inputs, use_reentrant=False)

    def sent(self, _: nn.Module, given: Any, made: Tensor) -> Tensor:
        """What diffusers computes on the CPU, on its way to the device; diffusers itself would wait for it there."""
        return made if self.mask is None else made.to(self.mask.device, non_blocking=True)

    def channels(self) -> int:
        return self.network.config.in_channels // 4

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        embeds, _, mask, *_ = self.pipe.encode_prompt(
            [prompt], device=device, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        return Conditioning(embeds, embeds.new_zeros(1, 0), None, (mask.to(embeds.dtype),))

    def blank(self, rows: int, dtype: torch.dtype) -> Conditioning:
        cond = super().blank(rows, dtype)
        return Conditioning(cond.embeds, cond.pooled, None, (torch.empty(rows, self.max_length, dtype=dtype),))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        height, width = x_t.shape[-2:]
        rows = (torch.arange(n, device=x_t.device, dtype=x_t.dtype) for n in (1, height // 2, width // 2))
        (text,) = cond.extra  # 1 for the prompt's tokens and one of padding, else 0
        picture = text.new_ones(len(text), height // 2 * (width // 2))
        self.mask = torch.cat([text, picture], dim=1)
        output = network(
            hidden_states=pack(x_t),
            timestep=t,
            encoder_hidden_states=cond.embeds,
            txt_ids=x_t.new_zeros(cond.embeds.shape[1], 3),
            img_ids=torch.cartesian_prod(*rows),
            attention_mask=self.mask,
            return_dict=False,
        )[0]
        return unpack(output, height, width)

    def plain_latents(self, latents: Tensor) -> Tensor:
        return pack(latents)
