"""Several extractors of divgen at once, as scoring has them one by one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diffrl.divgen.extractors import NONE, Device, Extractor, check_extractor, load_extractor
from diffrl.errors import UserError


def load_extractors(names: Mapping[str, str], device: Device = "cpu") -> tuple[dict[str, Extractor], dict[str, str]]:
    """Those of `names` (kind -> name) that can be loaded, and for the others why not; "none" is neither.

    Raises UserError for a name that does not exist: that is a mistake, not a missing file of weights.
    """
    for kind, name in names.items():
        check_extractor(kind, name)
    loaded: dict[str, Extractor] = {}
    missing: dict[str, str] = {}
    for kind, name in names.items():
        if name == NONE:
            missing[kind] = "left out"
            continue
        try:
            loaded[kind] = load_extractor(kind, name, device)
        except UserError as error:
            missing[kind] = str(error)
    return loaded, missing


def as_written(images: torch.Tensor) -> torch.Tensor:
    """What a PNG file gives back of images in [0, 1]: rounded to 8 bits."""
    return (images.detach().float().clamp(0, 1) * 255).round() / 255
