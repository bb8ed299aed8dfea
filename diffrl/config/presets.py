"""Defaults by a published model's name: what it is trained and measured with, where a config does not say it.

They are filled in when a config is read: so a run's config.yaml has the values themselves. A file's own model says
which, also where an override trains another one, such as a folder with the same weights.
"""

from __future__ import annotations

from typing import Any

# name: (side of the trained pictures in pixels, sampling steps of an evaluation: those that its family knows)
MODELS: dict[str, tuple[int, int]] = {
    "stabilityai/stable-diffusion-3.5-medium": (512, 40),
    "stabilityai/stable-diffusion-xl-base-1.0": (768, 50),
    "black-forest-labs/FLUX.1-dev": (512, 28),
    "black-forest-labs/FLUX.1-schnell": (512, 4),
    "black-forest-labs/FLUX.2-klein-base-4B": (512, 50),
    "Qwen/Qwen-Image": (512, 50),
    "Qwen/Qwen-Image-2.1": (512, 40),
    "Tongyi-MAI/Z-Image": (512, 50),
    "lodestones/Chroma1-HD": (512, 35),
    "Alpha-VLLM/Lumina-Image-2.0": (512, 30),
    "HiDream-ai/HiDream-I1-Full": (512, 50),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": (1024, 20),
    "krea/Krea-2": (512, 28),
}
EVALUATE = {"prompts": 256, "per_prompt": 2, "features": "facebook/dinov2-base"}


def preset(model: Any) -> dict[str, dict[str, Any]]:
    """Sections and keys of this model; nothing for another one."""
    model = model.partition("@")[0] if isinstance(model, str) else ""  # whatever its revision
    if model not in MODELS:
        return {}
    side, steps = MODELS[model]
    return {
        "rollout": {"resolution": side},
        "optimise": {"precision": "bf16"},
        "evaluate": {"steps": steps, **EVALUATE},
    }


def fill(data: dict[str, Any]) -> None:
    """Give a config's plain values the keys of its model's preset that they lack."""
    for name, keys in preset(data.get("model")).items():
        section = data.get(name) if data.get(name) is not None else {}
        if isinstance(section, dict):  # else an error, which is said at its place
            data[name] = keys | section
