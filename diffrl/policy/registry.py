"""Finds families: those that ship, installed ones (entry points of the group `diffrl.families`), and a user's file.

A family is known by its pipeline's class, the `_class_name` of model_index.json. Nothing is imported until it is used.
"""

from __future__ import annotations

from typing import Any

from diffrl.errors import UserError, nearest
from diffrl.plugins import installed, load, load_value

SHIPPED = {
    "StableDiffusion3Pipeline": "diffrl.families.sd3:SD3",
    "FluxPipeline": "diffrl.families.flux:Flux",
    "StableDiffusionPipeline": "diffrl.families.unet:StableDiffusion",
    "StableDiffusionXLPipeline": "diffrl.families.unet:StableDiffusion",
    "QwenImagePipeline": "diffrl.families.qwen_image:QwenImage",
    "ZImagePipeline": "diffrl.families.z_image:ZImage",
    "Flux2KleinPipeline": "diffrl.families.flux2:Flux2",
    "Flux2Pipeline": "diffrl.families.flux2:Flux2",
    "Krea2Pipeline": "diffrl.families.krea2:Krea2",
    "QwenImage21Pipeline": "diffrl.families.qwen_image21:QwenImage21",
    "SanaPipeline": "diffrl.families.sana:Sana",
    "ChromaPipeline": "diffrl.families.chroma:Chroma",
    "Lumina2Pipeline": "diffrl.families.lumina2:Lumina2",
    "HiDreamImagePipeline": "diffrl.families.hidream:HiDream",
}
# What a class must have of its own: the other parts of `Backbone` have defaults in `diffrl.families.family`.
NEEDED = ("load", "encode", "forward", "prediction", "guide", "timesteps", "to_vae", "from_vae", "save_lora", "blank")


def families() -> dict[str, str]:
    """`module:Class` of every family by its pipeline's class: the shipped ones first, then installed plugins."""
    return SHIPPED | {name: entry.value for name, entry in installed("family").items() if name not in SHIPPED}


def find_family(pipeline: str, family: str | None = None) -> Any:
    """The family of a pipeline's class, or the class `path/to/file.py:Class`; imported, not built.

    Raises:
        UserError: if there is none of that name, or the file or class is not there or is no family.
    """
    name, known = family or pipeline, families()
    if family is not None:
        family_class = load("family", family)
    elif pipeline in known:
        family_class = load_value("family", pipeline, known[pipeline])
    else:
        supported = f"supported are {', '.join(known)}"
        raise UserError(f"model: a {pipeline} is of no known family{nearest(pipeline, known)}; {supported}")
    if missing := [part for part in NEEDED if not callable(getattr(family_class, part, None))]:
        raise UserError(f'"{name}" is not a model family: it has no {", ".join(missing)}')
    return family_class
