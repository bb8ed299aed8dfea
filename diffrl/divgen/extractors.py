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
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from diffrl.errors import UserError, nearest
from diffrl.plugins import load
from diffrl.prompts import Prompt
from diffrl.worlds import worlds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Found = np.ndarray | None
Device: TypeAlias = "torch.device | str"  # "" is an accelerator if there is one

KINDS = ("identity", "style", "layout", "features", "lpips")
NONE = "none"  # the name that leaves a kind out
_VISION = "diffrl.divgen.vision"
Given = Mapping[str, str]
_SPACES: dict[str, tuple[str, Given]] = {
    "vit": ("Vit", {}),
    "clip": ("Space", {"name": "clip"}),
    "pixels": ("Space", {"name": "pixels"}),
}
EXTRACTORS: dict[str, dict[str, tuple[str, Given]]] = {  # kind -> name -> (class of `_VISION`, what it is given)
    "identity": {"arcface": ("ArcFace", {})},
    "style": {"csd": ("CSD", {}), **_SPACES},
    "layout": {"grounding-dino": ("GroundingDino", {})},
    "features": {
        # Oquab et al. 2023, arXiv 2304.07193.
        "dinov2": ("Vit", {"name": "dinov2", "weights": "facebook/dinov2-base"}),
        # arXiv 2508.10104, the ViT-L that GARDO uses; its weights are given out after a registration.
        "dinov3": ("Vit", {"name": "dinov3", "weights": "facebook/dinov3-vitl16-pretrain-lvd1689m"}),
        **_SPACES,
    },
    "lpips": {name: ("Lpips", {"name": name}) for name in ("alex", "vgg", "squeeze")},
}
DEFAULTS = {"identity": "arcface", "style": "csd", "layout": "grounding-dino", "features": "dinov2", "lpips": "alex"}


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
    plain, _, weights = name.partition(":")
    if plain not in (known := [*EXTRACTORS[kind], *_of_worlds(kind)]):
        hint = nearest(plain, [*known, NONE])
        raise UserError(f'{kind}: unknown extractor "{plain}"{hint}; one of your own is "path/to/file.py:Class"')
    if plain == "vit" and not weights:
        raise UserError(f'{kind}: "vit" needs a hub id or a folder: vit:facebook/dinov2-small')


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
        loaded, arguments = _of_worlds(kind).get(plain), dict[str, str]()
        if loaded is None:
            class_name, given = EXTRACTORS[kind][plain]
            loaded, arguments = getattr(importlib.import_module(_VISION), class_name), dict(given)
        arguments |= {"weights": weights} if weights else {}
        if weights and "weights" not in inspect.signature(loaded).parameters:
            raise UserError(f'{kind}: "{plain}" takes no weights, got "{weights}"')
    import torch

    extractor = loaded(device=device or ("cuda" if torch.cuda.is_available() else "cpu"), **arguments)
    if not callable(extractor) or not isinstance(getattr(extractor, "name", None), str):
        raise UserError(f'{kind}: "{name}" is not an extractor; it needs `name` and `__call__(images, prompts)`')
    return extractor
