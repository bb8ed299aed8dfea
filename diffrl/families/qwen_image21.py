"""Qwen-Image 2.1: one sequence of text and picture, latents without packing, 16 pixels to a side each.

A picture's place in the sequence comes after the text's last place, padding included: in the plain pipeline a batch of
texts of different length gives other pictures than its rows alone. Here rows of one length run together, so that a
picture does not depend on its company.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.families.qwen_image import OneFrame
from diffrl.policy.conditioning import Conditioning


class QwenImage21(OneFrame, Family):
    """The family's part of a policy (see `diffrl.families.family`)."""

    autoencoders = ("AutoencoderKLQwenImage21",)
    targets = tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
    empty = " "
    patch = 2  # a slot of the sequence stands for 2 x 2 latents
    default_side = 64
    multiple = 32
    own_lengths = True
    known = (Known("Qwen/Qwen-Image-2.1", 40, 1.0, "made for no guidance"),)
    restrictions = ("texts of different length run one length at a time",)

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.plain_call = {"use_kv_cache": False}

    def pixels_per_latent(self) -> int:
        return self.vae.config.scale_factor_spatial

    @property
    def text_shape(self) -> tuple[int, int, int]:
        return self.max_length, self.network.config.context_in_dim, 0

    @property
    def tokens(self) -> int:
        _, height, width = self.latent_shape
        return height * width

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        embeds, _, _ = self.pipe.encode_prompt([prompt], device=device)
        return Conditioning(embeds, embeds.new_zeros(1, 0), torch.tensor([embeds.shape[1]]))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        if cond.lengths is None or not cond.padded:
            return self._one_length(network, x_t, t, cond)
        outputs: dict[int, Tensor] = {}
        for length in cond.lengths.unique().tolist():
            rows = (cond.lengths == length).nonzero().flatten()
            here = rows.to(x_t.device, non_blocking=True)
            output = self._one_length(network, x_t[here], t[here], cond.select(rows))
            outputs |= dict(zip(rows.tolist(), output, strict=True))
        return torch.stack([outputs[i] for i in range(len(x_t))])

    def _one_length(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        b, _, height, width = x_t.shape
        text = torch.zeros(b, cond.embeds.shape[1], dtype=torch.bool, device=x_t.device)
        tokens = network(
            hidden_states=x_t.flatten(2).transpose(1, 2),
            timestep=t,
            encoder_hidden_states=cond.embeds,
            img_shapes=[[(1, height, width)]] * b,
            img_mask=torch.cat([text, text.new_ones(b, height * width // 4)], dim=1),
            return_dict=False,
        )[0]
        return tokens[:, -height * width :].transpose(1, 2).reshape(x_t.shape)

    def plain_latents(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).transpose(1, 2)

    def plain_guidance(self, guidance: float, rows: int) -> Mapping[str, Any]:
        return {"true_cfg_scale": guidance, "negative_prompt": [self.empty] * rows}
