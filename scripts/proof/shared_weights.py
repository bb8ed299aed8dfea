"""The families of `scripts/benchmarks/random_weights.py`, whose networks come from the proof's pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from networks import POOL
from random_weights import Random

from diffrl.families import flux, qwen_image, sd3
from diffrl.policy.pipelines import Resolution, settings_of


class Shared(Random):
    """Stands before a family."""

    @classmethod
    def load(cls, source: str, index: Mapping[str, Any], dtype: torch.dtype, resolution: Resolution = None) -> Any:
        pipe = POOL.lend(source, dtype, lambda: cls.made(source, index, dtype))
        return cls(pipe, resolution, settings_of(source).get("max_sequence_length"))  # type: ignore[call-arg]


class SD3(Shared, sd3.SD3):
    """Stable Diffusion 3 and 3.5."""


class Flux(Shared, flux.Flux):
    """FLUX.1."""


class QwenImage(Shared, qwen_image.QwenImage):
    """Qwen-Image."""
