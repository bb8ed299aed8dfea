"""Stable Diffusion 3 and 3.5, with and without a T5; the playground's model is one of them.

`timestep` of the network is t * 1000 as a float, the conditioning is what `encode_prompt` gives.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.families.family import Family, Known
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.pipelines import Resolution


class SD3(Family):
    """The family's part of a policy (see `diffrl.families.family`)."""

    text_length, longest_text = 256, 512
    known = (Known("stabilityai/stable-diffusion-3.5-medium", 40, 4.5), Known("playground", 10, 1.0))
    evidence = "trained (the playground's model)"
    max_shift = 1.16

    def __init__(self, pipe: Any, resolution: Resolution = None, max_sequence_length: int | None = None) -> None:
        config = pipe.transformer.config
        self.patch = config.patch_size
        super().__init__(pipe, resolution, max_sequence_length)
        # The last block drops its text stream after the attention, so its text queries reach nothing.
        self.dead_targets = (f"transformer_blocks.{config.num_layers - 1}.attn.add_q_proj",)

    def own_side(self) -> int:
        return self.network.config.sample_size

    def set_size(self, resolution: Resolution) -> None:
        super().set_size(resolution)
        most = self.network.config.pos_embed_max_size * self.patch
        if max(self.latent_shape[1:]) > most:
            raise UserError(f"rollout.resolution: this model draws sides of at most {most * self.scale} pixels")

    @property
    def text_shape(self) -> tuple[int, int, int]:
        config = self.network.config
        tokens = self.pipe.tokenizer_max_length + self.max_length
        return tokens, config.joint_attention_dim, config.pooled_projection_dim

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
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

    def timesteps(self, steps: int) -> Tensor:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        dynamic = scheduler.config.get("use_dynamic_shifting")
        # Unlike its kin this pipeline leaves the spacing to the scheduler.
        scheduler.set_timesteps(steps, device="cpu", **({"mu": self.mu(steps)} if dynamic else {}))
        return scheduler.sigmas.float()
