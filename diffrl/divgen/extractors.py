"""What looks at the images: extractors by name, or a class of one's own as `path/to/file.py:Class`.

An extractor is a class whose constructor takes `device` (and `weights`, what stands behind the colon of `NAME:WEIGHTS`,
if it can load others). Instances have a `name`, and map images (B, 3, H, W) float in [0, 1] with their B prompts to B
arrays, or None where nothing was found:

    identity   (F,) embedding of the face                      IDS
    style      (F,) embedding of the style                     ASC
    layout     (k, 4) boxes: left, top, right, bottom in [0, 1]; the prompt's metadata may say which `objects`   SDI
    features   (F,) embedding of the content                   diversity, Vendi score
    lpips      of the M images of one prompt (M, 3, H, W): the M (M - 1) / 2 distances, one array
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from diffrl.errors import UserError, nearest
from diffrl.features import load_features
from diffrl.plugins import load
from diffrl.prompts import Prompt
from diffrl.worlds import worlds

Found = np.ndarray | None
Device = torch.device | str

KINDS = ("identity", "style", "layout", "features", "lpips")
NONE = "none"  # the name that leaves a kind out
_VISION = "diffrl.divgen.vision"
EXTRACTORS: dict[str, dict[str, tuple[str, str]]] = {  # kind -> name -> (module, class)
    "identity": {"arcface": (_VISION, "ArcFace")},
    "style": {
        "csd": (_VISION, "CSD"),
        "clip": (__name__, "Clip"),
        "vit": (__name__, "Vit"),
        "pixels": (__name__, "Pixels"),
    },
    "layout": {"grounding-dino": (_VISION, "GroundingDino")},
    "features": {
        "dinov2": (__name__, "DinoV2"),
        "dinov3": (__name__, "DinoV3"),
        "vit": (__name__, "Vit"),
        "clip": (__name__, "Clip"),
        "pixels": (__name__, "Pixels"),
    },
    "lpips": {name: (_VISION, f"Lpips{name.capitalize()}") for name in ("alex", "vgg", "squeeze")},
}
DEFAULTS = {
    "identity": "arcface",
    "style": "csd",
    "layout": "grounding-dino",
    "features": "dinov2",
    "lpips": "alex",
}


def defaults_of(world: str) -> dict[str, str]:
    """The extractors, by kind, with which images of a world, or "general" ones, are measured."""
    return dict(DEFAULTS if world == "general" else worlds()[world].divgen.DEFAULTS)


class Extractor(Protocol):
    """See the module's documentation. For lpips the result is one array of distances instead."""

    name: str

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]: ...


def check_extractor(kind: str, name: str) -> None:
    """Raise UserError unless this names an extractor of the kind, or a class in a file that exists."""
    if name == NONE:
        return
    path, _, class_name = name.rpartition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise UserError(f'{kind}: no file "{path}"')
        if not class_name.isidentifier():
            raise UserError(f'{kind}: "{name}": write path/to/file.py:Class')
        return
    plain = name.partition(":")[0]
    if plain not in (known := [*EXTRACTORS[kind], *_of_worlds(kind)]):
        hint = nearest(plain, [*known, NONE])
        raise UserError(f'{kind}: unknown extractor "{plain}"{hint}; one of your own is "path/to/file.py:Class"')


def _of_worlds(kind: str) -> dict[str, Any]:
    """The extractors that worlds have for their own images, each under its world's name."""
    known = {name: world.divgen.EXTRACTORS.get(kind) for name, world in worlds().items() if world.divgen}
    return {name: extractor for name, extractor in known.items() if extractor is not None}


def load_extractor(kind: str, name: str, device: Device = "cpu") -> Extractor:
    """Build an extractor by its name (`NAME`, `NAME:WEIGHTS` or `path/to/file.py:Class`).

    Raises UserError if there is none of that name, or its package or weights are missing (and how to get them).
    """
    check_extractor(kind, name)
    path, _, class_name = name.rpartition(":")
    if path.endswith(".py"):
        loaded, arguments = load("extractor", name), {}
    else:
        plain, _, weights = name.partition(":")
        loaded = _of_worlds(kind).get(plain)
        if loaded is None:
            module, class_name = EXTRACTORS[kind][plain]
            loaded = getattr(importlib.import_module(module), class_name)
        arguments = {"weights": weights} if weights else {}
        if weights and "weights" not in inspect.signature(loaded).parameters:
            raise UserError(f'{kind}: "{plain}" takes no weights, got "{weights}"')
    extractor = loaded(device=device, **arguments)
    if not callable(extractor) or not isinstance(getattr(extractor, "name", None), str):
        raise UserError(f'{kind}: "{name}" is not an extractor; it needs `name` and `__call__(images, prompts)`')
    return extractor


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


class Vit:
    """Any vision model of transformers (DINOv2, DINOv3, ...), as a hub id or a local folder: its pooled output."""

    name = "vit"

    def __init__(self, weights: str, device: Device = "cpu") -> None:
        self.name = f"{self.name}:{weights}"
        try:
            self.features = load_features(weights, device)
        except UserError as error:
            raise UserError(str(error).removeprefix("evaluate.features: ")) from error

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        return list(self.features(images).numpy())


class DinoV2(Vit):
    """DINOv2 (Oquab et al. 2023, arXiv 2304.07193), the base model unless other weights are given."""

    name = "dinov2"

    def __init__(self, weights: str = "facebook/dinov2-base", device: Device = "cpu") -> None:
        super().__init__(weights, device)


class DinoV3(Vit):
    """DINOv3 (arXiv 2508.10104), the ViT-L that GARDO uses; its weights are given out after a registration."""

    name = "dinov3"

    def __init__(self, weights: str = "facebook/dinov3-vitl16-pretrain-lvd1689m", device: Device = "cpu") -> None:
        super().__init__(weights, device)


class Clip(Vit):
    """The image tower of the playground's CLIP."""

    name = "clip"

    def __init__(self, device: Device = "cpu") -> None:
        self.features = load_features("clip", device)


class Pixels(Vit):
    """Mean colours of an 8 x 8 grid; needs no model."""

    name = "pixels"

    def __init__(self, device: Device = "cpu") -> None:
        self.features = load_features("pixels", device)
