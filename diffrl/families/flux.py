"""FLUX.1: dev (guidance distilled into the network), schnell (few steps, no guidance) and finetunes of either.

Latents keep their image form (B, C, h, w) everywhere; the network's packed tokens, (B, h/2 * w/2, 4 C), exist inside
`forward` only. `timestep` of the network is t itself, it multiplies by 1000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.families.latents import pack, unpack
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.pipelines import Resolution


class Flux(Family):
    """The family's part of a policy (see `diffrl.families.family`).

    Guidance goes into the network where it was distilled (dev). Without an input for it (schnell) guidance other than 1
    is classifier-free, two rows each, what the plain pipeline calls `true_cfg_scale`. No target is dead: the text
    stream of the last double block goes on into the single ones.
    """

    longest_text = 512
    known = (
        Known("black-forest-labs/FLUX.1-dev", 28, 3.5, "guidance is an input of the network"),
        Known("black-forest-labs/FLUX.1-schnell", 4, 1.0, "distilled, no guidance"),
    )
    guidance_rule = "dev: embedded; schnell: classifier-free"

    def __init__(self, pipe: Any, resolution: Resolution = None, max_sequence_length: int | None = None) -> None:
        super().__init__(pipe, resolution, max_sequence_length)
        self.distilled = bool(self.network.config.guidance_embeds)
        self.classifier_free = not self.distilled

    def set_size(self, resolution: Resolution) -> None:
        super().set_size(resolution)
        _, height, width = self.latent_shape
        self._image_ids = FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32)

    def channels(self) -> int:
        return self.network.config.in_channels // 4

    @property
    def text_shape(self) -> tuple[int, int, int]:
        config = self.network.config
        return self.max_length, config.joint_attention_dim, config.pooled_projection_dim

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        embeds, pooled, _ = self.pipe.encode_prompt([prompt], None, device=device, **self.plain_call)
        return Conditioning(embeds, pooled)

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        if self._image_ids.device != x_t.device:
            self._image_ids = self._image_ids.to(x_t.device)
        tokens = network(
            hidden_states=pack(x_t),
            timestep=t,
            guidance=torch.full_like(t, guidance) if self.distilled else None,
            pooled_projections=cond.pooled,
            encoder_hidden_states=cond.embeds,
            txt_ids=x_t.new_zeros(cond.embeds.shape[1], 3),
            img_ids=self._image_ids,
            return_dict=False,
        )[0]
        return unpack(tokens, *x_t.shape[-2:])

    def plain_latents(self, latents: Tensor) -> Tensor:
        return pack(latents)

    def plain_guidance(self, guidance: float, rows: int) -> Mapping[str, Any]:
        if self.distilled or guidance == 1:
            return {"guidance_scale": guidance}
        return {"true_cfg_scale": guidance, "negative_prompt": [""] * rows}
