"""Families whose weights are random and made on the device, from a model's configs alone: true size, no download.

    model: assets/architectures/FLUX.1-dev
    family: scripts/benchmarks/random_weights.py:Flux

The text encoders are left out, since no vocabulary comes with the configs: a prompt's embedding is random, of the
largest shape that the family has, and the same for the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from diffrl import seeds
from diffrl.families import flux, qwen_image, sd3
from diffrl.memory.meta_modules import meta_pipeline
from diffrl.policy import Conditioning
from diffrl.policy.pipelines import Resolution, settings_of


class Random:
    """Stands before a family."""

    pipe: Any
    network: Any
    blank: Any
    denoiser: str

    @classmethod
    def load(cls, source: str, index: Mapping[str, Any], dtype: torch.dtype, resolution: Resolution = None) -> Any:
        pipe = cls.made(source, index, dtype)
        return cls(pipe, resolution, settings_of(source).get("max_sequence_length"))  # type: ignore[call-arg]

    @staticmethod
    def made(source: str, index: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """What stands for the pipeline."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        with torch.random.fork_rng(devices=[device] if cuda else []):
            torch.manual_seed(0)
            pipe = meta_pipeline(source, index, dtype, device, texts=False)
        for part in pipe.transformer.modules():
            for name, table in part._buffers.items():
                if table is not None and table.is_floating_point():
                    part._buffers[name] = table.to(dtype)  # as loading a checkpoint leaves it
        return pipe

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        cond: Conditioning = self.blank(1, next(self.network.parameters()).dtype)
        generator = seeds.generator("text", prompt or "")
        for tensor in (cond.embeds, cond.pooled, *cond.extra):
            tensor.normal_(generator=generator)
        return cond.to(device)

    def save_lora(self, directory: Path, file: str, state: dict[str, Tensor], metadata: dict[str, object]) -> None:
        words = {f"{self.denoiser}_lora_layers": state, f"{self.denoiser}_lora_adapter_metadata": metadata}
        getattr(diffusers, self.pipe.config._class_name).save_lora_weights(directory, weight_name=file, **words)


class SD3(Random, sd3.SD3):
    """Stable Diffusion 3 and 3.5."""


class Flux(Random, flux.Flux):
    """FLUX.1."""


class QwenImage(Random, qwen_image.QwenImage):
    """Qwen-Image."""
