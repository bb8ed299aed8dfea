"""Krea 2, base and distilled (turbo).

Every text token is a stack of the text encoder's layers. The plain pipeline pads between the prompt and what follows
it; the network sees no order among text tokens, so here the padding is left out. Autoencoder: Qwen-Image's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.families.latents import pack, unpack
from diffrl.families.qwen_image import OneFrame
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.pipelines import Resolution, schedule_shift

DISTILLED_MU = 1.15


class Krea2(OneFrame, Family):
    """The family's part of a policy (see `diffrl.families.family`).

    The plain pipeline adds `guidance_scale` times the difference to the conditional prediction: its 4.5 is 5.5 here,
    and its 0 is 1, none.
    """

    autoencoders = ("AutoencoderKLQwenImage",)
    targets = tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
    folded = ("text_fusion.layerwise_blocks.",)
    own_lengths = True
    known = (
        Known("Krea 2", 28, 5.5, "the plain pipeline's guidance_scale 4.5"),
        Known("Krea 2, distilled", 8, 1.0, "distilled, no guidance"),
    )
    guidance_rule = "classifier-free; the plain pipeline counts one less"

    def __init__(self, pipe: Any, resolution: Resolution = None, max_sequence_length: int | None = None) -> None:
        self.patch = pipe.config.patch_size
        super().__init__(pipe, resolution, max_sequence_length)
        self.layers = self.network.config.num_text_layers

    def channels(self) -> int:
        return self.network.config.in_channels // self.patch**2

    def pixels_per_latent(self) -> int:
        return 2 ** len(self.vae.config.temperal_downsample)

    @property
    def text_shape(self) -> tuple[int, int, int]:
        return self.max_length, self.network.config.text_hidden_dim, 0

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        embeds, mask = self.pipe.encode_prompt([prompt], device, max_sequence_length=self.max_length)
        embeds = embeds[:, mask[0]]
        return Conditioning(embeds, embeds.new_zeros(1, 0), torch.tensor([embeds.shape[1]]))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        height, width = x_t.shape[-2:]
        text = x_t.new_zeros(cond.embeds.shape[1], 3)
        rows, columns = height // self.patch, width // self.patch
        picture = torch.cartesian_prod(
            *(torch.arange(n, device=x_t.device, dtype=x_t.dtype) for n in (1, rows, columns))
        )
        tokens = network(
            hidden_states=pack(x_t, self.patch).to(cond.embeds.dtype),
            encoder_hidden_states=cond.embeds,
            timestep=t,
            position_ids=torch.cat([text, picture]),
            encoder_attention_mask=cond.mask if cond.padded else None,
            return_dict=False,
        )[0]
        return unpack(tokens, height, width, self.patch)

    def mu(self, steps: int) -> float:
        if self.pipe.config.is_distilled:
            return DISTILLED_MU
        config = {"max_image_seq_len": 6400, **self.pipe.scheduler.config}
        return schedule_shift(config, self.tokens, self.max_shift)

    def plain_latents(self, latents: Tensor) -> Tensor:
        return pack(latents, self.patch)

    def plain_guidance(self, guidance: float, rows: int) -> Mapping[str, Any]:
        return {"guidance_scale": guidance - 1}
