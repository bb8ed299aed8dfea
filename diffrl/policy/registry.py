"""Finds families: installed ones (entry points of the group `diffrl.families`, as the shipped are), and a user's file.

A family is known by its pipeline's class, the `_class_name` of model_index.json. Nothing is imported until it is used.
"""

from __future__ import annotations

from typing import Any

from diffrl.errors import UserError, nearest
from diffrl.plugins import by_package, installed, load

# What a class must have of its own: the other parts of `Backbone` have defaults in `diffrl.families.family`.
NEEDED = ("load", "encode", "forward", "prediction", "guide", "timesteps", "to_vae", "from_vae", "save_lora", "blank")


def find_family(pipeline: str, family: str | None = None) -> Any:
    """The family of a pipeline's class, or the class `path/to/file.py:Class`; imported, not built.

    Raises:
        UserError: if there is none of that name, or the file or class is not there or is no family.
    """
    name = family or pipeline
    if family is None and pipeline not in by_package("family"):
        known = installed("family")
        supported = f"supported are {', '.join(known)}"
        raise UserError(f"model: a {pipeline} is of no known family{nearest(pipeline, known)}; {supported}")
    family_class = load("family", name)
    if missing := [part for part in NEEDED if not callable(getattr(family_class, part, None))]:
        raise UserError(f'"{name}" is not a model family: it has no {", ".join(missing)}')
    return family_class
