"""CLIP score: the cosine between an image's and its prompt's embedding, with any `open_clip` model.

Shapes: B images, H x W pixels, D the width of the embedding.
"""

from __future__ import annotations

import functools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffrl.errors import UserError, nearest
from diffrl.hub import pinned
from diffrl.resources import shipped
from diffrl_zoo.cards import card_of
from diffrl_zoo.loading import PRECISIONS, cannot_load, channels, dtype_of, pick_device

RESIZE_MODES = ("shortest", "squash", "longest", "hps")
INTERPOLATIONS = ("bicubic", "bilinear")
_CACHE_TEXTS = 16_384


def resized(shape: tuple[int, int], size: tuple[int, int], mode: str) -> tuple[int, int]:
    """The height and width to which a picture of `shape` is resized for a model's `size`; then it is cropped or padded.

    To the pixel that of the code which the model comes with; see `fit` for the modes.
    """
    (h, w), (height, width) = shape, size
    if mode == "squash":
        return size
    if mode == "shortest" and height == width:  # torchvision's Resize, and transformers': whole pixels, cut
        return height * h // min(h, w), width * w // min(h, w)
    if mode == "hps":
        scale = height / max(h, w)
        return round(h * scale), round(w * scale)
    ratio = (max if mode == "longest" else min)(h / height, w / width)  # open_clip's ResizeKeepRatio
    return round(h / ratio), round(w / ratio)


def fit(
    images: Tensor, size: tuple[int, int], mode: str, interpolation: str = "bicubic", middle: Callable = round
) -> Tensor:
    """(B, 3, H, W) in [0, 1] to (B, 3, *size), as Pillow resizes a picture (antialiased), but differentiable.

    `mode`: "shortest" fits the shorter side and crops the longer one; "squash" changes the shape; "longest" fits the
    longer side and pads with black; "hps" does so as HPS's own code, which resizes floats: what bicubic overshoots
    stays. `middle` rounds half pixels where it crops: torchvision's `round`, or `int`.
    """
    height, width = size
    target = resized((images.shape[-2], images.shape[-1]), size, mode)
    if target != tuple(images.shape[-2:]):
        # Bicubic overshoots; a picture of bytes cannot, and Pillow's first pass, along the rows, gives one already.
        for size_now in (target,) if mode == "hps" else ((images.shape[-2], target[1]), target):
            images = F.interpolate(images, size_now, mode=interpolation, align_corners=False, antialias=True)
            images = images if mode == "hps" else images.clamp(0.0, 1.0)
    if mode in ("longest", "hps"):
        down, right = height - target[0], width - target[1]
        return F.pad(images, (right // 2, right - right // 2, down // 2, down - down // 2))
    top, left = middle((target[0] - height) / 2), middle((target[1] - width) / 2)
    return images[..., top : top + height, left : left + width]


def replaced(module: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """`module` with another sub-module at `path` ("a.b.c"); everything else is shared with it."""
    name, _, rest = path.partition(".")
    new = copy(module)
    new._modules = dict(module._modules)
    new._modules[name] = replaced(module.get_submodule(name), rest, part) if rest else part
    return new


class TextCache:
    """Text embeddings, each distinct text computed once; `encode` maps texts to (B, D)."""

    def __init__(self, encode: Callable[[list[str]], Tensor]) -> None:
        self.encode = encode
        self._known: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        if new := sorted(set(texts) - self._known.keys()):
            if len(self._known) > _CACHE_TEXTS:
                self._known.clear()
                new = sorted(set(texts))
            self._known.update(zip(new, self.encode(new), strict=True))
        return torch.stack([self._known[text] for text in texts])


class ImageEncoder(ABC):
    """A frozen encoder: images to unit vectors (B, D), float32, on tensors as its own transform does to a picture.

    `size`, `mode`, `interpolation`, `middle`: see `fit`. `crop`: what is cut out of that; None: all of it.
    """

    model: Any
    device: torch.device
    dtype: torch.dtype
    size: tuple[int, int]
    crop: tuple[int, int] | None = None
    mode: str
    interpolation = "bicubic"
    middle: Callable[[float], int] = staticmethod(round)
    mean: Tensor
    std: Tensor

    def preprocess(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to the model's input (B, 3, *crop); differentiable."""
        images = fit(images.to(self.device, torch.float32), self.size, self.mode, self.interpolation, self.middle)
        height, width = self.crop or self.size
        top, left = (self.size[0] - height) // 2, (self.size[1] - width) // 2
        return (images[..., top : top + height, left : left + width] - self.mean) / self.std

    def embed_image(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to unit vectors (B, D); gradients flow to the images."""
        return F.normalize(self.image_features(self.preprocess(images).to(self.dtype)).float(), dim=-1)

    @abstractmethod
    def image_features(self, pixels: Tensor) -> Tensor:
        """What `preprocess` gave, in the model's precision, to vectors (B, D) of any length."""


class PairEncoder(ImageEncoder):
    """An encoder of images and texts; `layers`: the path of the image tower's layers in `model`."""

    layers: str

    def __init__(self) -> None:
        self._texts = TextCache(lambda texts: F.normalize(self.text_features(texts).float(), dim=-1))

    @abstractmethod
    def text_features(self, texts: list[str]) -> Tensor:
        """Texts to vectors (B, D) of any length."""

    def check_tower(self) -> None:
        """UserError if the image tower has no `layers`."""

    def embed_text(self, prompts: Sequence[str]) -> Tensor:
        """Prompts to unit vectors (B, D), constants. Every distinct prompt is embedded once."""
        return self._texts(prompts)


class ClipModel(PairEncoder):
    """A frozen `open_clip` model.

    `model`: "playground" (the shipped one), a folder in `open_clip`'s format, a name of `open_clip` such as
    "ViT-H-14" with `pretrained` a tag or a file of weights, or "hf-hub:OWNER/NAME[@REVISION]". `precision`: fp32, bf16
    or fp16.
    """

    layers = "visual.transformer.resblocks"

    def __init__(self, model: str, pretrained: str | None, device: torch.device, precision: str) -> None:
        import open_clip

        super().__init__()
        self.device, self.dtype = device, dtype_of(precision, "clip")
        name = _open_clip_name(model, pretrained)
        if pretrained and name.startswith(("hf-hub:", "local-dir:")):
            raise UserError(f'clip: "{model}" has weights of its own; leave out `pretrained`')
        with cannot_load("clip", model, "the model "):
            self.model = open_clip.create_model(
                name, pretrained, precision=precision, device=device, require_pretrained=True
            ).eval()
            self.tokenize: Callable[[list[str]], Tensor] = open_clip.get_tokenizer(name)
        self.model.requires_grad_(False)
        preprocess = self.model.visual.preprocess_cfg
        size = preprocess["size"]
        self.size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        self.interpolation, self.mode = preprocess["interpolation"], preprocess["resize_mode"]
        self._check_resizing(model)
        self.mean, self.std = channels(device, preprocess["mean"], preprocess["std"])

    def resizing(self, mode: str | None, interpolation: str | None) -> ClipModel:
        """The same weights, of which images are resized otherwise (`fit`'s `mode`); None: as they are."""
        other = copy(self)
        other.mode, other.interpolation = mode or self.mode, interpolation or self.interpolation
        other._check_resizing("asked for")
        return other

    def _check_resizing(self, model: str) -> None:
        if self.mode not in RESIZE_MODES or self.interpolation not in INTERPOLATIONS:
            raise UserError(
                f'clip: "{model}" resizes by {self.mode}, {self.interpolation}, which is not supported '
                f"(modes: {', '.join(RESIZE_MODES)}; interpolations: {', '.join(INTERPOLATIONS)})"
            )

    def image_features(self, pixels: Tensor) -> Tensor:
        return self.model.encode_image(pixels)  # type: ignore[no-any-return]

    def text_features(self, texts: list[str]) -> Tensor:
        return self.model.encode_text(self.tokenize(texts).to(self.device))  # type: ignore[no-any-return]

    def tokens(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to the last layer's normed tokens (B, 1 + N, W): the class token, then the patches'.

        Raises `UserError` for an image tower without tokens (a ResNet).
        """
        pixels = self.preprocess(images).to(self.dtype)
        wanted: Any = {"indices": 1, "normalize_intermediates": True, "intermediates_only": True, "output_fmt": "NLC"}
        self.check_tower()
        found = self.model.visual.forward_intermediates(pixels, output_extra_tokens=True, **wanted)
        patches, extra = (found[key][-1] for key in ("image_intermediates", "image_intermediates_prefix"))
        return torch.cat([extra[:, :1], patches], dim=1).float()

    def check_tower(self) -> None:
        """UserError if the image tower is no vision transformer (a ResNet)."""
        import open_clip

        if not isinstance(self.model.visual, open_clip.transformer.VisionTransformer):
            kind = type(self.model.visual).__name__
            raise UserError(f"clip: a {kind} has no tokens of patches; take a vision transformer")


_models: dict[tuple[str | None, ...], ClipModel] = {}
_lock = threading.Lock()


def shared_clip(
    model: str,
    pretrained: str | None,
    device: str | None,
    precision: str,
    resize_mode: str | None = None,
    interpolation: str | None = None,
) -> ClipModel:
    """The `ClipModel` of these weights on this device, loaded once for all rewards. `device`: see `pick_device`.

    `resize_mode`, `interpolation`: see `ClipModel.resizing`.
    """
    place = pick_device(device)
    _commit(model, pretrained)  # each reward that looks through it records it
    key = (model, pretrained, str(place), precision)
    with _lock:
        if key not in _models:
            _models[key] = ClipModel(model, pretrained, place, precision)
        shared = _models[key]
        return shared.resizing(resize_mode, interpolation) if resize_mode or interpolation else shared


def _open_clip_name(model: str, pretrained: str | None) -> str:
    """The name under which `open_clip` loads `model`."""
    import open_clip

    folder = shipped("assets", "playground", "clip") if model == "playground" else Path(model)
    if folder.is_dir() and (folder / "open_clip_config.json").is_file():
        return f"local-dir:{folder}"
    if model == "playground":
        raise UserError(f"clip: no shipped model at {folder}; reinstall diffrl, or run scripts/train_playground.py")
    if model.startswith("hf-hub:"):
        return _fetched(model.removeprefix("hf-hub:"))
    if model.startswith("local-dir:"):
        return model
    if model not in open_clip.list_models():
        hint = nearest(model, open_clip.list_models())
        raise UserError(
            f'clip: "{model}" is neither a folder with open_clip_config.json nor a model of open_clip{hint}'
        )
    if pretrained is None:
        tags = [tag for name, tag in open_clip.list_pretrained() if name == model]
        raise UserError(f'clip: "{model}" needs `pretrained`, one of: {", ".join(tags)}, or a file of weights')
    return model


def _fetched(name: str) -> str:
    """The commit's folder of a hub's model, as `open_clip` loads it; the name, if no commit of it is known."""
    from huggingface_hub import snapshot_download

    source, at = pinned(name)
    if not at:
        return f"hf-hub:{name}"
    with cannot_load("clip", name):
        folder = snapshot_download(source, allow_patterns=["*.json", "*.txt", "*.safetensors", "*.model"], **at)
        if not any(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(source, allow_patterns=["open_clip*.bin"], **at)
    return f"local-dir:{folder}"


def _commit(model: str, pretrained: str | None) -> None:
    """Resolve the repository behind a tag of `open_clip`, which fetches it by itself."""
    if pretrained is None or Path(pretrained).exists():
        return
    from open_clip.pretrained import get_pretrained_cfg

    if repository := (get_pretrained_cfg(model, pretrained) or {}).get("hf_hub", "").strip("/"):
        pinned("/".join(repository.split("/")[:2]))


def clip_bytes(model: str, precision: str, pretrained: str | None = "", **_: Any) -> int | None:
    """Of the weights that a `ClipModel` has, which are not loaded; None for a hub's model. A `footprint`."""
    import open_clip

    if model.startswith("hf-hub:"):
        return None
    name = _open_clip_name(model, pretrained)
    if name.startswith("local-dir:"):
        config = json.loads((Path(name.removeprefix("local-dir:")) / "open_clip_config.json").read_text())["model_cfg"]
    else:
        config = open_clip.get_model_config(name)
    if config is None or precision not in PRECISIONS:
        return None
    return _clip_parameters(json.dumps(config)) * PRECISIONS[precision].itemsize


@functools.lru_cache(maxsize=8)  # advice asks again and again
def _clip_parameters(text: str) -> int:
    """How many numbers the model of a config of `open_clip` has."""
    import open_clip

    config = json.loads(text)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", None) else open_clip.CLIP
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind(**config).parameters())


class CosineReward:
    """A reward that is `factor` times the cosine of image and prompt in the space of one `PairEncoder`."""

    differentiable = True
    embeds = True

    def __init__(self, encoder: PairEncoder, factor: float, batch_size: int) -> None:
        self.clip, self.factor, self.batch_size = encoder, factor, batch_size
        self.device = encoder.device

    def embed_image(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to unit vectors (B, D); gradients flow to the images."""
        return self.clip.embed_image(images)

    def embed_text(self, prompts: Sequence[str]) -> Tensor:
        """Prompts to unit vectors (B, D)."""
        return self.clip.embed_text(prompts)

    @property
    def image_layers(self) -> nn.ModuleList:
        """The layers of the image tower, the first one first; UserError for a tower that is no transformer."""
        self.clip.check_tower()
        return self.clip.model.get_submodule(self.clip.layers)  # type: ignore[no-any-return]

    def with_image_layers(self, layers: nn.ModuleList) -> Self:
        """This reward with other layers; everything else is shared."""
        new = copy(self)
        new.clip = copy(self.clip)
        new.clip.model = replaced(self.clip.model, self.clip.layers, layers)
        return new

    def score(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """Scores (B,) of unit vectors (B, D): `factor` times their cosine."""
        return self.factor * (image_embeddings * text_embeddings).sum(dim=-1)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        return self.score(self.embed_image(images), self.embed_text(prompts))


class Clip(CosineReward):
    """Cosine between the embeddings of image and prompt, in [-1, 1]; times 100 with `scale`.

    Parameters as in `ClipModel`; `device` None means an accelerator if there is one; `batch_size`: images per forward.
    `resize_mode` (one of `fit`'s), `interpolation` (bicubic, bilinear): None for the model's own. The `clipscore` of
    Flow-GRPO's followers is OpenAI's model with bilinear. Prompts are tokenised as `open_clip` does: a literal
    "<|endoftext|>" is text here, and ends the prompt in transformers' tokenizer.
    """

    name = "clip"
    card = card_of(name)

    def __init__(
        self,
        model: str = "playground",
        pretrained: str | None = None,
        device: str | None = None,
        batch_size: int = 64,
        precision: str = "fp32",
        scale: bool = False,
        resize_mode: str | None = None,
        interpolation: str | None = None,
    ) -> None:
        clip = shared_clip(model, pretrained, device, precision, resize_mode, interpolation)
        super().__init__(clip, 100.0 if scale else 1.0, batch_size)
        self.card = replace(type(self).card, range=(-self.factor, self.factor))

    footprint = staticmethod(clip_bytes)
