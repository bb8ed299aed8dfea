"""The feature space of the playground's own CLIP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch


def clip_features(folder: Path, side: int, device: torch.device | str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its image tower: images (B, 3, H, W) in [0, 1], read at `side` pixels, to (B, F) on the CPU. Anyone loads it with
    `open_clip.create_model_and_transforms("local-dir:FOLDER")`."""
    model: Any = open_clip.create_model(f"local-dir:{folder}", device=str(device)).eval()
    mean, std = (torch.tensor(model.visual.preprocess_cfg[k]).view(1, 3, 1, 1).to(device) for k in ("mean", "std"))

    def embed(images: torch.Tensor) -> torch.Tensor:
        x = images.to(device).float()
        if x.shape[-2:] != (side, side):
            x = torch.nn.functional.interpolate(x, size=(side, side), mode="bicubic", antialias=True).clamp(0, 1)
        with torch.no_grad():
            return model.encode_image((x - mean) / std).float().cpu()

    return embed
