"""A vision model of transformers as a feature space, such as DINOv2's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel

from diffrl.errors import UserError
from diffrl.hub import pinned


def vision_features(name: str, device: torch.device | str) -> Callable[[Tensor], Tensor]:
    """Of a local folder or hub id: images (B, 3, H, W) in [0, 1] to (B, F) on the CPU; UserError where it is none."""
    try:
        source, at = pinned(name)
        model = AutoModel.from_pretrained(source, **at).eval().requires_grad_(False).to(device)
        processor = AutoImageProcessor.from_pretrained(source, **at)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"evaluate.features: no vision model {name!r} ({reason}); choose pixels or clip") from error
    size = dict(processor.size)
    crop = dict((getattr(processor, "do_center_crop", None) and processor.crop_size) or size)
    side = [int(crop.get(name) or crop["shortest_edge"]) for name in ("height", "width")]
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (processor.image_mean, processor.image_std))
    return partial(_vit_features, model, size.get("shortest_edge") or 0, side, mean, std)


def _vit_features(model: nn.Module, edge: int, crop: list[int], mean: Tensor, std: Tensor, images: Tensor) -> Tensor:
    device, (h, w) = next(model.parameters()).device, images.shape[-2:]
    size = [int(edge * h / min(h, w)), int(edge * w / min(h, w))] if edge else crop  # as the processor does it
    x = F.interpolate(images.to(device).float(), size=size, mode="bicubic", antialias=True).clamp(0, 1)
    x = x[..., (size[0] - crop[0]) // 2 :, (size[1] - crop[1]) // 2 :][..., : crop[0], : crop[1]]
    with torch.no_grad():
        return model((x - mean.to(device)) / std.to(device)).pooler_output.float().cpu()
