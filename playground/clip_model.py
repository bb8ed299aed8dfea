"""The image features of the playground's CLIP: a small but real `open_clip` model, in the folder format of its
`local-dir:` schema.

A folder holds `open_clip_config.json`, `open_clip_model.safetensors` and the tokenizer's files; anyone loads it with
`open_clip.create_model_and_transforms("local-dir:FOLDER")` and `open_clip.get_tokenizer("local-dir:FOLDER")`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def features(directory: Path, device: torch.device | str = "cpu") -> Callable[[torch.Tensor], torch.Tensor]:
    """A model's image tower: images (B, 3, H, W) in [0, 1] to (B, F) on the CPU."""
    import open_clip

    model: Any = open_clip.create_model(f"local-dir:{directory}", device=str(device)).eval()
    preprocess = model.visual.preprocess_cfg
    mean, std = (torch.tensor(preprocess[k]).view(1, 3, 1, 1) for k in ("mean", "std"))
    side = preprocess["size"][0] if isinstance(preprocess["size"], (tuple, list)) else preprocess["size"]

    def embed(images: torch.Tensor) -> torch.Tensor:
        x = images.to(device).float()
        if x.shape[-1] != side or x.shape[-2] != side:
            x = torch.nn.functional.interpolate(x, size=(side, side), mode="bicubic", antialias=True).clamp(0, 1)
        with torch.no_grad():
            return model.encode_image((x - mean.to(x.device)) / std.to(x.device)).float().cpu()

    return embed
