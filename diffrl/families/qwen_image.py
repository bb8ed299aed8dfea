"""Qwen-Image and Qwen-Image-2512.

Latents are per-channel normalised, (B, 16, h, w), of an autoencoder for video: its fifth dimension exists in `to_vae`
and `from_vae` only. Texts keep their own length; padding is masked in every attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.families.latents import channelwise, pack, to_norm_of, unpack
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.meaning import refuse_others
from diffrl.policy.pipelines import Resolution


class OneFrame:
    """Latents (B, C, h, w), normalised by channel, of an autoencoder for video, which takes and gives one frame."""

    vae: Any

    def to_vae(self, latents: Tensor) -> Tensor:
        mean, std = self._by_channel(latents)
        return (latents * std + mean).unsqueeze(2)

    def from_vae(self, decoded: Tensor) -> Tensor:
        return decoded[:, :, 0]

    def to_encoder(self, images: Tensor) -> Tensor:
        return images.unsqueeze(2)

    def from_encoder(self, encoded: Tensor) -> Tensor:
        mean, std = self._by_channel(encoded)
        return (encoded[:, :, 0] - mean) / std

    def _by_channel(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        config = self.vae.config
        return channelwise(config.latents_mean, latents), channelwise(config.latents_std, latents)


class QwenImage(OneFrame, Family):
    """The family's part of a policy (see `diffrl.families.family`)."""

    autoencoders = ("AutoencoderKLQwenImage",)
    empty = " "
    own_lengths = True
    longest_text = 1024
    known = (Known("Qwen/Qwen-Image", 50, 4.0), Known("Qwen/Qwen-Image-2512", 50, 4.0))
    guidance_rule = "classifier-free, rescaled per token to the conditional norm"

    def __init__(self, pipe: Any, resolution: Resolution = None, max_sequence_length: int | None = None) -> None:
        super().__init__(pipe, resolution, max_sequence_length)
        config = self.network.config
        # Nothing reads the text stream after the last block: its queries and its output projection reach nothing.
        last = f"transformer_blocks.{config.num_layers - 1}.attn"
        mlp = last.replace(".attn", ".txt_mlp")
        self.dead_targets = (f"{last}.add_q_proj", f"{last}.to_add_out", f"{mlp}.net.0.proj", f"{mlp}.net.2")

    def check_meaning(self) -> None:
        super().check_meaning()
        refuse_others("transformer/config.json", self.network.config, {"guidance_embeds": False})  # as an input

    def channels(self) -> int:
        return self.network.config.in_channels // 4

    def pixels_per_latent(self) -> int:
        return 2 ** len(self.vae.config.temperal_downsample)

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        embeds, _ = self.pipe.encode_prompt([prompt], device, max_sequence_length=self.max_length)
        return Conditioning(embeds, embeds.new_zeros(1, 0), torch.tensor([embeds.shape[1]]))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        height, width = x_t.shape[-2:]
        tokens = network(
            hidden_states=pack(x_t),
            timestep=t,
            encoder_hidden_states=cond.embeds,
            encoder_hidden_states_mask=cond.mask if cond.padded else None,
            img_shapes=[[(1, height // 2, width // 2)]] * len(x_t),
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)

    def guide(self, positive: Tensor, negative: Tensor, guidance: float, t: Tensor) -> Tensor:
        positive, negative = pack(positive), pack(negative)
        combined = to_norm_of(negative + guidance * (positive - negative), positive)
        _, height, width = self.latent_shape
        return unpack(combined, height, width)

    def plain_latents(self, latents: Tensor) -> Tensor:
        return pack(latents)

    def plain_guidance(self, guidance: float, rows: int) -> Mapping[str, Any]:
        return {"true_cfg_scale": guidance, "negative_prompt": [self.empty] * rows}
