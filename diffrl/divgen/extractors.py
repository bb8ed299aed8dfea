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

from diffrl.divgen.diversity import load_features
from diffrl.errors import UserError, nearest
from diffrl.prompts import Prompt
from diffrl.resources import import_file

Found = np.ndarray | None
Device = torch.device | str

KINDS = ("identity", "style", "layout", "features", "lpips")
NONE = "none"  # the name that leaves a kind out
_VISION = "diffrl.divgen.vision"
EXTRACTORS: dict[str, dict[str, tuple[str, str]]] = {  # kind -> name -> (module, class)
    "identity": {"arcface": (_VISION, "ArcFace"), "playground": (__name__, "PlaygroundHead")},
    "style": {
        "csd": (_VISION, "CSD"),
        "clip": (__name__, "Clip"),
        "vit": (__name__, "Vit"),
        "pixels": (__name__, "Pixels"),
    },
    "layout": {"grounding-dino": (_VISION, "GroundingDino"), "playground": (__name__, "PlaygroundBoxes")},
    "features": {
        "dinov2": (__name__, "DinoV2"),
        "dinov3": (__name__, "DinoV3"),
        "vit": (__name__, "Vit"),
        "clip": (__name__, "Clip"),
        "pixels": (__name__, "Pixels"),
    },
    "lpips": {name: (_VISION, f"Lpips{name.capitalize()}") for name in ("alex", "vgg", "squeeze")},
}
DEFAULTS: dict[str, dict[str, str]] = {
    "general": {
        "identity": "arcface",
        "style": "csd",
        "layout": "grounding-dino",
        "features": "dinov2",
        "lpips": "alex",
    },
    "playground": {
        "identity": "playground",
        "style": "clip",
        "layout": "playground",
        "features": "clip",
        "lpips": NONE,
    },
}


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
    if plain not in EXTRACTORS[kind]:
        hint = nearest(plain, [*EXTRACTORS[kind], NONE])
        raise UserError(f'{kind}: unknown extractor "{plain}"{hint}; one of your own is "path/to/file.py:Class"')


def load_extractor(kind: str, name: str, device: Device = "cpu") -> Extractor:
    """Build an extractor by its name (`NAME`, `NAME:WEIGHTS` or `path/to/file.py:Class`).

    Raises UserError if there is none of that name, or its package or weights are missing (and how to get them).
    """
    check_extractor(kind, name)
    path, _, class_name = name.rpartition(":")
    if path.endswith(".py"):
        loaded, arguments = _class_of(Path(path), class_name), {}
    else:
        plain, _, weights = name.partition(":")
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


def _class_of(path: Path, class_name: str) -> Any:
    module = import_file(path, "extractor")
    if not hasattr(module, class_name):
        raise UserError(f'no class "{class_name}" in {path}{nearest(class_name, vars(module))}')
    return getattr(module, class_name)


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


class PlaygroundHead:
    """The verifier's attributes of a cartoon head, each one-hot: the cosine of two is the share on which they agree.

    (13,): 3 skins, 4 hairs, 2 moods, glasses or not, hat or not. Independent uniform heads have a mean cosine of
    (1/3 + 1/4 + 1/2 + 1/2 + 1/2) / 5 = 0.417.
    """

    name = "playground"

    def __init__(self, device: Device = "cpu") -> None:
        pass

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        from diffrl_playground.grammar import HAIRS, MOODS, SKINS, YES_NO
        from diffrl_playground.sight import to_pixels
        from diffrl_playground.verifier import see

        features = {"skin": SKINS, "hair": HAIRS, "mood": MOODS, "glasses": YES_NO, "hat": YES_NO}
        result: list[Found] = []
        for image in to_pixels(images):
            head = see(image).head
            if head is None:
                result.append(None)
                continue
            shown = [head[name] == value for name, values in features.items() for value in values]
            result.append(np.array(shown, np.float32))
        return result


class PlaygroundBoxes:
    """The verifier's boxes of all things in an image, in [0, 1]; None for an empty image."""

    name = "playground"

    def __init__(self, device: Device = "cpu") -> None:
        pass

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Sequence[Found]:
        from diffrl_playground.sight import SIZE, to_pixels
        from diffrl_playground.verifier import see

        layouts = [see(image).layout for image in to_pixels(images)]
        return [np.array(boxes, np.float32) / SIZE if boxes else None for boxes in layouts]
