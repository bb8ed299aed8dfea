"""Stable Diffusion 1.x, 2.x and SDXL: a UNet that predicts noise or velocity on a variance-preserving path.

`timestep` of the UNet is the training grid's step, t T - 1, as a float: never truncated. A latent at t = 1 is noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.forward import Prediction, VariancePreserving
from diffrl.policy.base import Conditioning
from diffrl.policy.pipelines import latent_side, load_pipeline


class StableDiffusion:
    """The family's part of a policy (see `diffrl.policy.base.Backbone`).

    Noise levels are those of diffusers' DDIM scheduler with the pipeline's own settings, whatever solver the pipeline
    comes with (PNDM, Euler): grid, spacing and offset are the model's, and all of them agree on these. The last step
    ends on the clean latent (`set_alpha_to_one`); where the pipeline's config ends on the first grid step instead, as
    Stable Diffusion 1.5's does, pictures differ by less than 1 of 255.
    """

    pipeline: Any = StableDiffusionPipeline
    without: Mapping[str, Any] = {"safety_checker": None, "requires_safety_checker": False}
    classifier_free = True
    targets: tuple[str, ...] = tuple(
        f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")
    )
    dead_targets: tuple[str, ...] = ()
    plain_call: Mapping[str, Any] = {}

    def __init__(self, pipe: Any, resolution: int | None = None) -> None:
        config = pipe.unet.config
        self.pipe, self.network, self.vae = pipe, pipe.unet, pipe.vae
        encoders = (pipe.text_encoder, getattr(pipe, "text_encoder_2", None))
        self.text_encoders: list[nn.Module] = [encoder for encoder in encoders if encoder is not None]
        self.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
        self.process = VariancePreserving(self.scheduler.alphas_cumprod)
        self.kind = self.scheduler.config.prediction_type
        if self.kind not in ("epsilon", "v_prediction"):
            raise UserError(f'model: prediction_type "{self.kind}"; supported are epsilon, v_prediction')
        if config.in_channels != self.vae.config.latent_channels:
            text = f"a UNet with {config.in_channels} input channels"
            raise UserError(f"model: {text} for {self.vae.config.latent_channels} latent ones is not text-to-image")
        side = latent_side(resolution, config.sample_size, pipe.vae_scale_factor)
        self.latent_shape: tuple[int, int, int] = (config.in_channels, side, side)
        pooled = encoders[1].config.projection_dim if encoders[1] is not None else 0
        self.text_shape = (encoders[0].config.max_position_embeddings, config.cross_attention_dim, pooled)

    @classmethod
    def load(
        cls, source: str, index: Mapping[str, Any], dtype: torch.dtype, resolution: int | None = None
    ) -> StableDiffusion:
        """From a folder in diffusers' format or a hub id, whose model_index.json is `index`."""
        return cls(load_pipeline(cls.pipeline, source, index, dtype, **cls.without), resolution)

    def encode(self, prompt: str, device: torch.device) -> Conditioning:
        embeds, _ = self.pipe.encode_prompt([prompt], device, 1, False)
        return Conditioning(embeds, embeds.new_zeros(len(embeds), 0))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        added = self._added(x_t, cond)
        more = {} if added is None else {"added_cond_kwargs": added}
        return network(x_t, self.process.index(t), encoder_hidden_states=cond.embeds, return_dict=False, **more)[0]

    def _added(self, x_t: Tensor, cond: Conditioning) -> dict[str, Tensor] | None:
        """What the UNet is told beside the prompt's tokens."""
        return None

    def prediction(self, x_t: Tensor, t: Tensor, output: Tensor) -> Prediction:
        if self.kind == "epsilon":
            return self.process.from_eps(x_t, output, t)
        return self.process.from_velocity(x_t, output, t)

    def timesteps(self, steps: int) -> Tensor:
        scheduler = DDIMScheduler.from_config(self.scheduler.config)
        scheduler.set_timesteps(steps, device="cpu")
        levels = (scheduler.timesteps.float() + 1) / self.process.steps
        return torch.cat([levels, levels.new_zeros(1)])

    def save_lora(self, directory: Path, file: str, state: dict[str, Tensor], metadata: dict[str, object]) -> None:
        self.pipeline.save_lora_weights(
            directory, unet_lora_layers=state, unet_lora_adapter_metadata=metadata, weight_name=file
        )


class StableDiffusionXL(StableDiffusion):
    """SDXL: two text encoders, a pooled embedding, and the picture's size as a condition."""

    pipeline = StableDiffusionXLPipeline
    without: Mapping[str, Any] = {}

    def encode(self, prompt: str, device: torch.device) -> Conditioning:
        embeds, _, pooled, _ = self.pipe.encode_prompt([prompt], None, device, 1, False)
        if prompt == "" and self.pipe.config.force_zeros_for_empty_prompt:  # the guidance's empty prompt, as trained
            return Conditioning(torch.zeros_like(embeds), torch.zeros_like(pooled))
        return Conditioning(embeds, pooled)

    def _added(self, x_t: Tensor, cond: Conditioning) -> dict[str, Tensor]:
        """Original size, crop and target size: an uncropped picture of the latent's own size."""
        side = (x_t.shape[-2] * self.pipe.vae_scale_factor, x_t.shape[-1] * self.pipe.vae_scale_factor)
        sizes = x_t.new_tensor([*side, 0, 0, *side]).expand(len(x_t), -1)
        return {"text_embeds": cond.pooled, "time_ids": sizes}
