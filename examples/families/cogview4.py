"""CogView4, as a family of one's own: written by the page "Add a model" by somebody who had not written the seam.

diffrl models check examples/families/cogview4.py:CogView4
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from torch import Tensor, nn

from diffrl.families.family import Family, Known
from diffrl.policy.conditioning import Conditioning


class CogView4(Family):
    """The network is told the level before the schedule's shift, and texts of one length only can share a call."""

    targets = tuple(f"attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
    text_length, own_lengths = 1024, True
    known = (Known("THUDM/CogView4-6B", 50, 3.5),)
    restrictions = ("one forward for each length of text in a batch: the network's mask is added, and masks nothing",)

    @property
    def text_shape(self) -> tuple[int, int, int]:
        return self.max_length, self.network.config.text_embed_dim, 0

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        words = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length}
        embeds, _ = self.pipe.encode_prompt([prompt], device=device, **words)
        return Conditioning(embeds, embeds.new_zeros(1, 0), torch.tensor([embeds.shape[1]]))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        if not cond.padded:
            return self._call(network, x_t, t, cond.embeds)
        texts, output = cond.rows(), torch.zeros_like(x_t)
        for length in sorted({len(text) for text in texts}):
            rows = torch.tensor([i for i, text in enumerate(texts) if len(text) == length], device=x_t.device)
            part = self._call(network, x_t[rows], t[rows], torch.stack([texts[i] for i in rows.tolist()]))
            output = output.index_copy(0, rows, part.to(output.dtype))
        return output

    def _call(self, network: nn.Module, x_t: Tensor, t: Tensor, embeds: Tensor) -> Tensor:
        size = embeds.new_tensor([side * self.scale for side in self.latent_shape[1:]]).repeat(len(x_t), 1)
        # The pipeline hands over evenly spaced times, and steps between levels that are shifted: the shift, undone.
        shift = self._shift()
        time = 1000 * t / (t + shift * (1 - t))
        places = {"original_size": size, "target_size": size, "crop_coords": torch.zeros_like(size)}
        return network(x_t.to(embeds.dtype), embeds, time, **places, return_dict=False)[0]

    def _shift(self) -> float:
        """k of level = k s / (1 + (k - 1) s)."""
        config = self.pipe.scheduler.config
        if not config.use_dynamic_shifting:
            return config.shift
        return self.mu(0) if config.time_shift_type == "linear" else math.exp(self.mu(0))

    def mu(self, steps: int) -> float:
        config = self.pipe.scheduler.config
        root = (self.tokens / config.get("base_image_seq_len", 256)) ** 0.5
        return root * config.get("max_shift", 0.75) + config.get("base_shift", 0.25)

    def timesteps(self, steps: int) -> Tensor:
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        times = np.linspace(1000, 1.0, steps).astype(np.int64).astype(np.float32)
        scheduler.set_timesteps(timesteps=times, sigmas=times / 1000, device="cpu", mu=self.mu(steps))
        return scheduler.sigmas.float()


def tiny(folder: Path) -> int:
    """Save a random pipeline of the true classes; returns the side of its pictures in pixels."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))  # whose tiny pipelines share parts with this one
    from tiny_models.classic import WIDTH, image_vae, spread, t5_encoder

    torch.manual_seed(0)
    _, tokenizer = t5_encoder()
    tokenizer.padding_side = "left"
    encoder = transformers.GlmModel(
        transformers.GlmConfig(
            vocab_size=len(tokenizer),
            hidden_size=2 * WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            pad_token_id=0,
        )
    )
    transformer = diffusers.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=2 * WIDTH,
        time_embed_dim=16,
        condition_dim=8,
        sample_size=8,
        rope_axes_dim=(8, 8),
    )
    modules: list[Any] = [encoder, transformer]
    for module in modules:
        spread(module)
    words = {"base_shift": 0.25, "max_shift": 0.75, "base_image_seq_len": 256, "time_shift_type": "linear"}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **words)
    parts = {"text_encoder": encoder, "tokenizer": tokenizer, "transformer": transformer, "scheduler": scheduler}
    pipe: Any = diffusers.CogView4Pipeline(**parts, vae=image_vae())
    pipe.save_pretrained(folder)
    (folder / "diffrl.json").write_text(json.dumps({"max_sequence_length": 48}))
    return 16
