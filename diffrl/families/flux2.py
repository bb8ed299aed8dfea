"""FLUX.2: dev (guidance distilled into the network), klein-base (classifier-free) and the distilled klein.

Latents are squares of 2 x 2 of the autoencoder's, normalised by its BatchNorm's statistics: (B, 128, h, w), 16 pixels
to a side each. The text has one length; the network takes no mask.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux2KleinPipeline
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.families.latents import channelwise
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.meaning import refuse_others
from diffrl.policy.pipelines import JOINT_ATTENTION, Resolution


class Flux2(Family):
    """The family's part of a policy (see `diffrl.families.family`)."""

    autoencoders = ("AutoencoderKLFlux2",)
    targets = (*JOINT_ATTENTION, "attn.to_qkv_mlp_proj", "attn.to_out")
    patch = 1
    default_side = 64
    known = (
        Known("black-forest-labs/FLUX.2-klein-base-4B", 50, 4.0),
        Known("black-forest-labs/FLUX.2-klein-4B", 4, 1.0, "distilled, no guidance"),
        Known("black-forest-labs/FLUX.2-dev", 50, 2.5, "guidance is an input of the network"),
    )
    guidance_rule = "klein: classifier-free; dev: embedded"

    def __init__(self, pipe: Any, resolution: Resolution = None, max_sequence_length: int | None = None) -> None:
        super().__init__(pipe, resolution, max_sequence_length)
        self.embedded = bool(self.network.config.guidance_embeds)
        self.classifier_free = not self.embedded

    def check_meaning(self) -> None:
        super().check_meaning()
        # Klein's pipeline hands the network no guidance. What doctor counts on has the name of its class alone.
        klein = isinstance(self.pipe, Flux2KleinPipeline) or (
            getattr(self.pipe.config, "_class_name", "") == Flux2KleinPipeline.__name__
        )
        refuse_others("transformer/config.json", self.network.config, {"guidance_embeds": not klein})

    def pixels_per_latent(self) -> int:
        return 2 * super().pixels_per_latent()

    def vae_channels(self) -> int:
        return 4 * super().vae_channels()

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        embeds, _ = self.pipe.encode_prompt([prompt], device, max_sequence_length=self.max_length)
        return Conditioning(embeds, embeds.new_zeros(1, 0))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        height, width = x_t.shape[-2:]
        tokens = network(
            hidden_states=x_t.flatten(2).transpose(1, 2),
            timestep=t,
            guidance=torch.full_like(t, guidance) if self.embedded else None,
            encoder_hidden_states=cond.embeds,
            txt_ids=places(1, 1, cond.embeds.shape[1], x_t.device).expand(len(x_t), -1, -1),
            img_ids=places(height, width, 1, x_t.device).expand(len(x_t), -1, -1),
            return_dict=False,
        )[0]
        return tokens.transpose(1, 2).reshape(x_t.shape)

    def mu(self, steps: int) -> float:
        """Of tokens and steps: two lines in the tokens, measured at 10 and 200 steps, and the line between them."""
        tokens = self.tokens
        at_200 = 0.00016927 * tokens + 0.45666666
        if tokens > 4300:
            return at_200
        at_10 = 8.73809524e-05 * tokens + 1.89833333
        slope = (at_200 - at_10) / 190
        return slope * steps + at_200 - 200 * slope

    def to_vae(self, latents: Tensor) -> Tensor:
        norm = self.vae.bn
        mean, var = (channelwise(values, latents) for values in (norm.running_mean, norm.running_var))
        z = latents * (var + self.vae.config.batch_norm_eps).sqrt() + mean
        b, c, h, w = z.shape
        return z.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)

    def from_encoder(self, encoded: Tensor) -> Tensor:
        b, c, h, w = encoded.shape
        z = encoded.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)
        norm = self.vae.bn
        mean, var = (channelwise(values, z) for values in (norm.running_mean, norm.running_var))
        return (z - mean) / (var + self.vae.config.batch_norm_eps).sqrt()

    def prepare_plain(self, pipe: Any) -> None:
        if not self.embedded:
            pipe.register_to_config(is_distilled=False)  # else it ignores guidance; here it is the empty prompt's row


def places(height: int, width: int, length: int, device: torch.device) -> Tensor:
    """Coordinates (time, row, column, place in the text) of tokens: (1, height width length, 4)."""
    ranges = (torch.arange(n, device=device) for n in (1, height, width, length))
    return torch.cartesian_prod(*ranges)[None]
