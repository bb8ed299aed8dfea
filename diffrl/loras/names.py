"""Names of a LoRA's tensors: whose they are, and what each is there."""

from __future__ import annotations

import re

MATRIX = re.compile(
    r"\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up|alpha|dora_scale|lora_magnitude_vector)"
    r"(\.default|\.default_0)?(\.weight)?"
)
KINDS = {"lora_down": "lora_A", "lora.down": "lora_A", "lora_up": "lora_B", "lora.up": "lora_B"}
PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet.", "lora_unet_",
            "lora_transformer_", "lycoris_")  # fmt: skip


def split(key: str) -> tuple[str, str | None]:
    """A layer's name without prefixes, and what the tensor is in it; None: something else."""
    found = MATRIX.search(key)
    if found is None or found.end() != len(key):
        return key, None
    stem = key[: found.start()]
    for prefix in PREFIXES:
        stem = stem.removeprefix(prefix)
    return stem, KINDS.get(found[1], found[1])
