"""Stable Diffusion 3 and 3.5, with and without a T5; the playground's model is one of them.

`timestep` of the network is t * 1000 as a float, the conditioning is what `encode_prompt` gives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from diffrl.forward import FlowMatching, Prediction
from diffrl.policy.base import Conditioning
from diffrl.policy.pipelines import JOINT_ATTENTION, latent_side, load_pipeline, schedule_shift, settings_of

MAX_SEQUENCE_LENGTH = 256  # diffusers' own default


class SD3:
    """The family's part of a policy (see `diffrl.policy.base.Backbone`)."""

    classifier_free = True
    targets: tuple[str, ...] = JOINT_ATTENTION

    def __init__(self, pipe: Any, resolution: int | None = None, max_sequence_length: int | None = None) -> None:
        config = pipe.transformer.config
        self.pipe, self.network, self.vae = pipe, pipe.transformer, pipe.vae
        encoders = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
        self.text_encoders: list[nn.Module] = [encoder for encoder in encoders if encoder is not None]
        self.process = FlowMatching()
        # The last block drops its text stream after the attention, so its text queries reach nothing.
        self.dead_targets: tuple[str, ...] = (f"transformer_blocks.{config.num_layers - 1}.attn.add_q_proj",)
        side = latent_side(resolution, config.sample_size, pipe.vae_scale_factor, config.patch_size)
        self.latent_shape: tuple[int, int, int] = (config.in_channels, side, side)
        length = MAX_SEQUENCE_LENGTH if max_sequence_length is None else max_sequence_length
        self.plain_call: Mapping[str, Any] = {"max_sequence_length": length}
        self.text_shape = (pipe.tokenizer_max_length + length, config.joint_attention_dim, config.pooled_projection_dim)

    @classmethod
    def load(cls, source: str, index: Mapping[str, Any], dtype: torch.dtype, resolution: int | None = None) -> SD3:
        """From a folder in diffusers' format or a hub id, whose model_index.json is `index`."""
        pipe = load_pipeline(StableDiffusion3Pipeline, source, index, dtype)
        return cls(pipe, resolution, settings_of(source).get("max_sequence_length"))

    def encode(self, prompt: str, device: torch.device) -> Conditioning:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            [prompt], None, None, device=device, do_classifier_free_guidance=False, **self.plain_call
        )
        return Conditioning(embeds, pooled)

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        return network(
            hidden_states=x_t,
            timestep=t * self.pipe.scheduler.config.num_train_timesteps,
            encoder_hidden_states=cond.embeds,
            pooled_projections=cond.pooled,
            return_dict=False,
        )[0]

    def prediction(self, x_t: Tensor, t: Tensor, output: Tensor) -> Prediction:
        return self.process.from_velocity(x_t, output, t)

    def timesteps(self, steps: int) -> Tensor:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        config, shift = scheduler.config, {}
        if config.get("use_dynamic_shifting"):  # as the pipeline itself does
            _, height, width = self.latent_shape
            patch = self.network.config.patch_size  # type: ignore[union-attr]
            tokens = (height // patch) * (width // patch)  # type: ignore[operator]
            shift["mu"] = schedule_shift(config, tokens, 1.16)
        scheduler.set_timesteps(steps, device="cpu", **shift)
        return scheduler.sigmas.float()

    def save_lora(self, directory: Path, file: str, state: dict[str, Tensor], metadata: dict[str, object]) -> None:
        StableDiffusion3Pipeline.save_lora_weights(
            directory,
            transformer_lora_layers=state,
            transformer_lora_adapter_metadata=metadata,
            weight_name=file,
        )
