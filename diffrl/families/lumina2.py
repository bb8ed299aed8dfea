"""Lumina-Image 2.0.

The network is called with 1 - t and says minus the velocity. Prompts are encoded behind the pipeline's system prompt,
the empty one without it. The pipeline shifts its schedule by the number of latent channels and not of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.families.latents import to_norm_of
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.pipelines import schedule_shift


class Lumina2(Family):
    """The family's part of a policy (see `diffrl.families.family`)."""

    targets = tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
    empty = None
    own_lengths = True
    text_length, longest_text = 256, 512
    known = (Known("Alpha-VLLM/Lumina-Image-2.0", 30, 4.0),)
    guidance_rule = "classifier-free, rescaled per row of the latent to the conditional norm"

    def own_side(self) -> int:
        return self.network.config.sample_size

    @property
    def text_shape(self) -> tuple[int, int, int]:
        return self.max_length, self.network.config.cap_feat_dim, 0

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        encoded = self.pipe.encode_prompt(
            [prompt or ""], prompt is None, device=device, max_sequence_length=self.max_length
        )
        embeds, mask = encoded[2:] if prompt is None else encoded[:2]
        embeds = embeds[:, mask[0].bool()]
        return Conditioning(embeds, embeds.new_zeros(1, 0), torch.tensor([embeds.shape[1]]))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        rope: Any = self.network.rope_embedder
        if x_t.is_cuda and not rope.freqs_cis[0].is_cuda:  # else diffusers would bring them there in every forward
            rope.freqs_cis = [table.to(x_t.device) for table in rope.freqs_cis]
        output = network(
            hidden_states=x_t,
            timestep=1 - t,
            encoder_hidden_states=cond.embeds,
            encoder_attention_mask=cond.mask,
            return_dict=False,
        )[0]
        return -output

    def guide(self, positive: Tensor, negative: Tensor, guidance: float, t: Tensor) -> Tensor:
        return to_norm_of(negative + guidance * (positive - negative), positive)

    def mu(self, steps: int) -> float:
        return schedule_shift(self.pipe.scheduler.config, self.latent_shape[0], self.max_shift)
