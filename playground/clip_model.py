"""The playground's CLIP: a small but real `open_clip` model, in the folder format of `open_clip`'s `local-dir:` schema.

A folder holds `open_clip_config.json`, `open_clip_model.safetensors` and the tokenizer's files; anyone loads it with
`open_clip.create_model_and_transforms("local-dir:FOLDER")` and `open_clip.get_tokenizer("local-dir:FOLDER")`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffrl.errors import UserError

CONFIG_FILE, WEIGHTS_FILE = "open_clip_config.json", "open_clip_model.safetensors"


def load_clip(
    directory: str | Path, device: str | torch.device = "cpu", precision: str = "fp32"
) -> tuple[torch.nn.Module, Callable[..., torch.Tensor], dict[str, Any]]:
    """`(model in eval mode, tokenizer: texts -> (B, T) ids, preprocess config: size, mean, std, interpolation ...)`.

    Raises `UserError` when the folder, its config or its weights are missing; nothing is fetched from anywhere.
    """
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise UserError(f"no CLIP model in {directory}: {name} is missing")
    import open_clip

    name = f"local-dir:{directory}"
    model = open_clip.create_model(name, precision=precision, device=str(device)).eval()
    return model, open_clip.get_tokenizer(name), dict(model.visual.preprocess_cfg)


def features(directory: Path, device: torch.device | str = "cpu") -> Callable[[torch.Tensor], torch.Tensor]:
    """A model's image tower: images (B, 3, H, W) in [0, 1] to (B, F) on the CPU."""
    model: Any
    model, _, preprocess = load_clip(directory, device=str(device))
    mean, std = (torch.tensor(preprocess[k]).view(1, 3, 1, 1) for k in ("mean", "std"))
    side = preprocess["size"][0] if isinstance(preprocess["size"], (tuple, list)) else preprocess["size"]

    def embed(images: torch.Tensor) -> torch.Tensor:
        x = images.to(device).float()
        if x.shape[-1] != side or x.shape[-2] != side:
            x = torch.nn.functional.interpolate(x, size=(side, side), mode="bicubic", antialias=True).clamp(0, 1)
        with torch.no_grad():
            return model.encode_image((x - mean.to(x.device)) / std.to(x.device)).float().cpu()

    return embed
