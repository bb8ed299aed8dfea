"""Builds, writes and reads the playground's CLIP models, small but real ones in `open_clip`'s folder format.

A folder holds `open_clip_config.json`, `open_clip_model.safetensors` and the tokenizer's files; anyone loads it with
`open_clip.create_model_and_transforms("local-dir:FOLDER")` and `open_clip.get_tokenizer("local-dir:FOLDER")`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from diffrl.errors import UserError

CONFIG_FILE, WEIGHTS_FILE = "open_clip_config.json", "open_clip_model.safetensors"
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


def clip_config(
    vocab_size: int,
    *,
    image_size: int = 64,
    patch_size: int = 16,
    width: int = 128,
    layers: int = 4,
    text_width: int = 128,
    text_layers: int = 2,
    embed_dim: int = 64,
    context_length: int = 16,
) -> dict[str, Any]:
    """A ViT CLIP's config in `open_clip`'s form: `{"model_cfg": ..., "preprocess_cfg": ...}`; sizes in pixels.

    Heads are 32 wide. Images are normalised with mean and standard deviation 0.5 per channel, from [0, 1] to [-1, 1].
    """
    model = {
        "embed_dim": embed_dim,
        "vision_cfg": {
            "image_size": image_size,
            "layers": layers,
            "width": width,
            "head_width": 32,
            "patch_size": patch_size,
        },
        "text_cfg": {
            "context_length": context_length,
            "vocab_size": vocab_size,
            "hf_tokenizer_name": "local",  # any name: with `local-dir:` open_clip reads the tokenizer from the folder
            "width": text_width,
            "heads": max(text_width // 32, 1),
            "layers": text_layers,
        },
    }
    preprocess = {"size": image_size, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic"}
    return {"model_cfg": model, "preprocess_cfg": preprocess | {"resize_mode": "shortest"}}


def build_clip(config: dict[str, Any]) -> torch.nn.Module:
    """A freshly initialised `open_clip.CLIP`, fp32, on the CPU. `config`: as `clip_config` returns it."""
    from open_clip.model import CLIP

    return CLIP(**deepcopy(config["model_cfg"]))


def save_clip(
    model: torch.nn.Module,
    config: dict[str, Any],
    tokenizer_files: str | Path | Iterable[str | Path],
    directory: str | Path,
) -> None:
    """Writes the model's folder. `tokenizer_files`: the tokenizer's folder, or its files. Weights keep their dtype."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer_files, (str, Path)):
        tokenizer_files = [Path(tokenizer_files) / name for name in TOKENIZER_FILES]
    for file in map(Path, tokenizer_files):
        if file.resolve().parent != directory.resolve():
            shutil.copyfile(file, directory / file.name)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, str(directory / WEIGHTS_FILE))


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
