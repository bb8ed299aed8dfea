"""FLUX.1: dev (guidance distilled into the network), schnell (few steps, no guidance) and finetunes of either.

Latents keep their image form (B, C, h, w) everywhere; the network's packed tokens, (B, h/2 * w/2, 4 C), exist inside
`forward` only. `timestep` of the network is t itself, it multiplies by 1000.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from diffrl.forward import FlowMatching, Prediction
from diffrl.policy.base import Conditioning
from diffrl.policy.pipelines import JOINT_ATTENTION, latent_side, load_pipeline, schedule_shift, settings_of

MAX_SEQUENCE_LENGTH = 512  # of the T5; diffusers' own default


class Flux:
    """The family's part of a policy (see `diffrl.policy.base.Backbone`).

    Guidance goes into the network where it was distilled (dev). Without an input for it (schnell) guidance other than 1
    is classifier-free, two rows each, what the plain pipeline calls `true_cfg_scale`.
    """

    targets: tuple[str, ...] = JOINT_ATTENTION  # of the double blocks; its first three of the single ones, too
    dead_targets: tuple[str, ...] = ()  # the text stream of the last double block goes on into the single ones

    def __init__(self, pipe: Any, resolution: int | None = None, max_sequence_length: int | None = None) -> None:
        config = pipe.transformer.config
        self.pipe, self.network, self.vae = pipe, pipe.transformer, pipe.vae
        self.text_encoders: list[nn.Module] = [pipe.text_encoder, pipe.text_encoder_2]
        self.process = FlowMatching()
        self.distilled = bool(config.guidance_embeds)
        self.classifier_free = not self.distilled
        side = latent_side(resolution, pipe.default_sample_size, pipe.vae_scale_factor, patch=2)
        self.latent_shape: tuple[int, int, int] = (config.in_channels // 4, side, side)
        self._image_ids = pipe._prepare_latent_image_ids(1, side // 2, side // 2, "cpu", torch.float32)
        length = max_sequence_length or MAX_SEQUENCE_LENGTH
        self.plain_call: Mapping[str, Any] = {"max_sequence_length": length}
        self.text_shape = (length, config.joint_attention_dim, config.pooled_projection_dim)

    @classmethod
    def load(cls, source: str, index: Mapping[str, Any], dtype: torch.dtype, resolution: int | None = None) -> Flux:
        """From a folder in diffusers' format or a hub id, whose model_index.json is `index`."""
        pipe = load_pipeline(FluxPipeline, source, index, dtype)
        return cls(pipe, resolution, settings_of(source).get("max_sequence_length"))

    def encode(self, prompt: str, device: torch.device) -> Conditioning:
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

    def prediction(self, x_t: Tensor, t: Tensor, output: Tensor) -> Prediction:
        return self.process.from_velocity(x_t, output, t)

    def timesteps(self, steps: int) -> Tensor:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        _, height, width = self.latent_shape
        mu = schedule_shift(scheduler.config, height // 2 * (width // 2), 1.15)
        # What the pipeline itself passes: evenly spaced down to 1 / steps, then shifted by the scheduler.
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device="cpu", mu=mu)
        return scheduler.sigmas.float()

    def save_lora(self, directory: Path, file: str, state: dict[str, Tensor], metadata: dict[str, object]) -> None:
        FluxPipeline.save_lora_weights(
            directory,
            transformer_lora_layers=state,
            transformer_lora_adapter_metadata=metadata,
            weight_name=file,
        )


def pack(x: Tensor) -> Tensor:
    """(B, C, h, w) as tokens (B, h/2 * w/2, 4 C): squares of 2 x 2, channel-major."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h // 2 * (w // 2), 4 * c)


def unpack(tokens: Tensor, h: int, w: int) -> Tensor:
    """The inverse of `pack`: (B, h/2 * w/2, 4 C) as (B, C, h, w)."""
    b, _, width = tokens.shape
    squares = tokens.view(b, h // 2, w // 2, width // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(b, width // 4, h, w)
