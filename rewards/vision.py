"""Frozen image encoders of transformers (DINO, SigLIP, CLIP, ...), shared between the zoo's rewards.

Shapes: B images, H x W pixels, D the width of an embedding.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.hub import pinned
from diffrl_zoo import loading
from diffrl_zoo.clip import ClipModel, ImageEncoder, clip_bytes, fit, shared_clip
from diffrl_zoo.inputs import check_choice

FEATURES = ("clip", "transformers")
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def read_processor(encoder: ImageEncoder, processor: Any, where: str) -> None:
    """Takes sizes and constants from an image processor, whose work is done here on tensors, with gradients."""
    size = dict(processor.size)
    crop = dict(processor.crop_size) if getattr(processor, "do_center_crop", False) else None
    interpolation = _RESAMPLE.get(int(processor.resample))
    if interpolation is None:
        raise UserError(f"{where} resizes with Pillow's filter {processor.resample}, which is not supported")
    if "height" in size and "width" in size:
        encoder.size, encoder.mode = (int(size["height"]), int(size["width"])), "squash"
    elif "shortest_edge" in size and crop is not None:
        encoder.size, encoder.mode = (int(size["shortest_edge"]),) * 2, "shortest"
    else:
        raise UserError(f"{where} resizes to {size} and crops to {crop}, which is not supported")
    encoder.interpolation, encoder.middle = interpolation, int
    encoder.crop = encoder.size if crop is None else (int(crop["height"]), int(crop["width"]))
    if encoder.crop[0] > encoder.size[0] or encoder.crop[1] > encoder.size[1]:
        raise UserError(f"{where} crops to {encoder.crop} after resizing to {encoder.size}, which is not supported")
    encoder.mean, encoder.std = loading.channels(encoder.device, processor.image_mean, processor.image_std)


class VisionModel(ImageEncoder):
    """An image encoder of transformers.

    `model`: a hub id or a folder in transformers' format, with its image processor. Of models of image and text only
    the image's half is loaded. The embedding is the model's pooled output, or the first token where it has none.
    """

    def __init__(self, model: str, device: torch.device, precision: str, reward: str) -> None:
        import transformers

        self.device, self.dtype = device, loading.dtype_of(precision, reward)
        with loading.cannot_load(reward, model):
            config = loading.from_pretrained(transformers.AutoConfig, model)
            kind = getattr(transformers, loading.HALVES.get(config.model_type, "AutoModel"))
            self.model = loading.frozen(kind, model, self.dtype, device)
            processor = loading.from_pretrained(transformers.AutoImageProcessor, model)
        self.width: int = self.model.config.hidden_size
        read_processor(self, processor, f'{reward}: "{model}"')

    def image_features(self, pixels: Tensor) -> Tensor:
        output = self.model(pixel_values=pixels)
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        return output.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)  # type: ignore[no-any-return]

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

        processor = loading.from_pretrained(CLIPImageProcessor, source)
        self.device, self.size = device, (int(processor.crop_size["height"]), int(processor.crop_size["width"]))
        fill = [int(v * 255) / 255 for v in processor.image_mean]
        self.mean, self.std, self.fill = loading.channels(device, processor.image_mean, processor.image_std, fill)

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
    source, at = (None, {}) if model is None else pinned(model)
    network, info = kind.from_pretrained(source, config=config, dtype=dtype, output_loading_info=True, **at, **more)
    if wrong := sorted([*info["missing_keys"], *info["unexpected_keys"]]):
        raise UserError(f"{where} does not fit its class ({len(wrong)} tensors, the first: {wrong[0]})")
    return network.eval().requires_grad_(False)


_models: dict[tuple[str, ...], VisionModel] = {}
_lock = threading.Lock()


def shared_vision(model: str, device: str | None, precision: str, reward: str) -> VisionModel:
    """The `VisionModel` of these weights on this device, loaded once for all rewards; `reward` names who asks."""
    place = loading.pick_device(device)
    pinned(model)  # each reward that looks through it records its commit
    key = (model, str(place), precision)
    with _lock:
        if key not in _models:
            _models[key] = VisionModel(model, place, precision, reward)
        return _models[key]


def encoder_bytes(features: str, model: str, pretrained: str | None, precision: str, **_: Any) -> int | None:
    """Bytes of the weights of a `shared_encoder`: the `footprint` of a reward that looks through one."""
    if features == "clip":
        return clip_bytes(model, precision, pretrained)
    return loading.transformers_bytes("AutoModel", model, precision, half=True)


def shared_encoder(
    features: str, model: str, pretrained: str | None, device: str | None, precision: str, reward: str
) -> ClipModel | VisionModel:
    """The shared image encoder of the kind `features`: "clip" (`open_clip`, see `shared_clip`) or "transformers"."""
    check_choice("features", features, FEATURES, reward)
    if features == "clip":
        return shared_clip(model, pretrained, device, precision)
    if pretrained is not None:
        raise UserError(f'{reward}: "{model}" of transformers has weights of its own; leave out `pretrained`')
    return shared_vision(model, device, precision, reward)


@dataclass(eq=False, repr=False, kw_only=True)
class Looker:
    """A reward that looks through a shared image encoder, see `shared_encoder`; `batch_size`: images per forward.

    Of `features` clip `model` and `pretrained` are as in the reward `clip`; of transformers `model` is a hub id or a
    folder, for example facebook/dinov2-base.
    """

    name = ""
    features: str = "clip"
    model: str = "playground"
    pretrained: str | None = None
    device: Any = None
    precision: str = "fp32"
    batch_size: int = 64

    def look(self) -> None:
        """Loads the `encoder`."""
        chosen = (self.features, self.model, self.pretrained, self.device, self.precision)
        self.encoder = shared_encoder(*chosen, self.name)
        self.device = self.encoder.device

    footprint = staticmethod(encoder_bytes)
