"""Frozen image encoders of transformers (DINO, SigLIP, CLIP, ...), shared between the zoo's rewards.

Shapes: B images, H x W pixels, D the width of an embedding.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.errors import UserError, nearest
from diffrl_zoo.clip import PRECISIONS, ClipModel, clip_bytes, fit, pick_device, shared_clip

FEATURES = ("clip", "transformers")
HALVES = {"siglip": "SiglipVisionModel", "clip": "CLIPVisionModel"}  # of image and text: what has the image's half
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def transformers_bytes(kind: str, model: str, precision: str, half: bool = False) -> int | None:
    """Of the weights that transformers' `kind` loads for a model, by its config alone; None if there is none here.

    half: of models of image and text the image's half alone.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model)
        if half and config.model_type in HALVES:
            config = config.vision_config
        with torch.device("meta"):
            made = getattr(transformers, kind).from_config(config)
        return sum(parameter.numel() for parameter in made.parameters()) * PRECISIONS[precision].itemsize
    except (OSError, ValueError, KeyError):
        return None


class VisionModel:
    """An image encoder of transformers: images to unit vectors (B, D), float32; gradients flow to the images.

    `model`: a hub id or a folder in transformers' format, with its image processor. Of models of image and text only
    the image's half is loaded. The embedding is the model's pooled output, or the first token where it has none.
    """

    def __init__(self, model: str, device: torch.device, precision: str, reward: str) -> None:
        import transformers

        if precision not in PRECISIONS:
            raise UserError(f'{reward}: unknown precision "{precision}"{nearest(precision, PRECISIONS)}')
        try:
            config = transformers.AutoConfig.from_pretrained(model)
            kind = getattr(transformers, HALVES.get(config.model_type, "AutoModel"))
            network = kind.from_pretrained(model, dtype=PRECISIONS[precision])
            processor = transformers.AutoImageProcessor.from_pretrained(model)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f'{reward}: cannot load "{model}": {" ".join(str(error).split())}') from error
        self.model: Any = network.eval().requires_grad_(False).to(device)
        self.device, self.dtype = device, PRECISIONS[precision]
        self.width: int = network.config.hidden_size
        self._read_processor(processor, f'{reward}: "{model}"')

    def _read_processor(self, processor: Any, where: str) -> None:
        """Takes sizes and constants from the image processor, whose work is done here on tensors, with gradients."""
        size = dict(processor.size)
        crop = dict(processor.crop_size) if getattr(processor, "do_center_crop", False) else None
        interpolation = _RESAMPLE.get(int(processor.resample))
        if interpolation is None:
            raise UserError(f"{where} resizes with Pillow's filter {processor.resample}, which is not supported")
        if "height" in size and "width" in size:
            self.size, self.mode = (int(size["height"]), int(size["width"])), "squash"
        elif "shortest_edge" in size and crop is not None:
            self.size, self.mode = (int(size["shortest_edge"]),) * 2, "shortest"
        else:
            raise UserError(f"{where} resizes to {size} and crops to {crop}, which is not supported")
        self.interpolation, self.crop = interpolation, self.size if crop is None else (crop["height"], crop["width"])
        if self.crop[0] > self.size[0] or self.crop[1] > self.size[1]:
            raise UserError(f"{where} crops to {self.crop} after resizing to {self.size}, which is not supported")
        values = (processor.image_mean, processor.image_std)
        self.mean, self.std = (torch.tensor(v, device=self.device).view(3, 1, 1) for v in values)

    def preprocess(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to the model's input (B, 3, *crop), as its image processor does; differentiable."""
        images = fit(images.to(self.device, torch.float32), self.size, self.mode, self.interpolation, middle=int)
        top, left = (self.size[0] - self.crop[0]) // 2, (self.size[1] - self.crop[1]) // 2
        return (images[..., top : top + self.crop[0], left : left + self.crop[1]] - self.mean) / self.std

    def embed_image(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to unit vectors (B, D)."""
        output = self.model(pixel_values=self.preprocess(images).to(self.dtype))
        pooled = getattr(output, "pooler_output", None)
        pooled = output.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)
        return F.normalize(pooled.float(), dim=-1)

    def tokens(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to the last layer's tokens (B, 1 + N, W): the class token (SigLIP, which has none: the
        pooled output), then the patches'; register tokens are left out."""
        output = self.model(pixel_values=self.preprocess(images).to(self.dtype))
        hidden, config = output.last_hidden_state, self.model.config
        if config.model_type.startswith("siglip"):
            return torch.cat([output.pooler_output[:, None], hidden], dim=1).float()
        registers = getattr(config, "num_register_tokens", 0) or 0
        return torch.cat([hidden[:, :1], hidden[:, 1 + registers :]], dim=1).float()


class SquareInput:
    """What LLaVA and its like do to images (B, 3, H, W) in [0, 1]: pad to a square, resize, normalise; differentiable.

    The two stripes beside the shorter side have the mean colour, cut to bytes. `source`: hub id or folder with CLIP's
    image processor, whose sizes and constants are used. Raises what transformers raises if there is none.
    """

    def __init__(self, source: str, device: torch.device) -> None:
        from transformers import CLIPImageProcessor

        processor = CLIPImageProcessor.from_pretrained(source)
        self.device, self.size = device, (int(processor.crop_size["height"]), int(processor.crop_size["width"]))
        values = (processor.image_mean, processor.image_std)
        self.mean, self.std = (torch.tensor(v, device=device).view(3, 1, 1) for v in values)
        self.fill = torch.tensor([int(v * 255) / 255 for v in processor.image_mean], device=device).view(3, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(self.device, torch.float32)
        height, width = images.shape[-2:]
        side = max(height, width)
        top, left = (side - height) // 2, (side - width) // 2
        squares = self.fill.expand(len(images), 3, side, side).clone()
        squares[..., top : top + height, left : left + width] = images
        return (fit(squares, self.size, "shortest", middle=int) - self.mean) / self.std


def complete(kind: Any, model: str | None, config: Any, dtype: torch.dtype, where: str, **more: Any) -> Any:
    """`kind.from_pretrained(model)` with `config`, frozen; UserError if a tensor is left over or lacking.

    `where` begins its message. `more`: for `from_pretrained`, whose OSError, ValueError and RuntimeError pass through.
    """
    network, info = kind.from_pretrained(model, config=config, dtype=dtype, output_loading_info=True, **more)
    if wrong := sorted([*info["missing_keys"], *info["unexpected_keys"]]):
        raise UserError(f"{where} does not fit its class ({len(wrong)} tensors, the first: {wrong[0]})")
    return network.eval().requires_grad_(False)


_models: dict[tuple[str, ...], VisionModel] = {}
_lock = threading.Lock()


def shared_vision(model: str, device: str | None, precision: str, reward: str) -> VisionModel:
    """The `VisionModel` of these weights on this device, loaded once for all rewards; `reward` names who asks."""
    place = pick_device(device)
    key = (model, str(place), precision)
    with _lock:
        if key not in _models:
            _models[key] = VisionModel(model, place, precision, reward)
        return _models[key]


def encoder_bytes(features: str, model: str, pretrained: str | None, precision: str, **_: Any) -> int | None:
    """Bytes of the weights of a `shared_encoder`: the `footprint` of a reward that looks through one."""
    if features == "clip":
        return clip_bytes(model, pretrained, precision)
    return transformers_bytes("AutoModel", model, precision, half=True)


def shared_encoder(
    features: str, model: str, pretrained: str | None, device: str | None, precision: str, reward: str
) -> ClipModel | VisionModel:
    """The shared image encoder of the kind `features`: "clip" (`open_clip`, see `shared_clip`) or "transformers"."""
    if features not in FEATURES:
        raise UserError(f'{reward}: unknown features "{features}"{nearest(features, FEATURES)}')
    if features == "clip":
        return shared_clip(model, pretrained, device, precision)
    if pretrained is not None:
        raise UserError(f'{reward}: "{model}" of transformers has weights of its own; leave out `pretrained`')
    return shared_vision(model, device, precision, reward)
