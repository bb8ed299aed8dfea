"""Objectives from outside: a class in a user's file, or an installed one (entry points of group `diffrl.objectives`).

Either is the objective's class, whose `section` has its keys and its facts, or that section itself, which names the
class (`method.trainer`): then nothing heavy is imported when a config is read. Shipped objectives are the latter.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from diffrl.config.base import Section
from diffrl.errors import UserError, nearest
from diffrl.resources import class_in_file, where

GROUP = "diffrl.objectives"


def installed() -> dict[str, str]:
    """`module:Class` of every installed objective by its name. Nothing is imported."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def find_outside(objective: str, shipped: Sequence[str] = ()) -> type[Section]:
    """The section of `path/to/file.py:Class`, or of an installed objective.

    Raises:
        UserError: there is none, with the nearest name; it cannot be imported; it does not say what it is.
    """
    thing = load(objective, shipped)
    kind = thing if isinstance(thing, type) and issubclass(thing, Section) else getattr(thing, "section", None)
    if kind is None:
        raise UserError(f'"{objective}" has no `section`: the class of its keys, with a `method` that says what it is')
    if not (isinstance(kind, type) and issubclass(kind, Section)) or kind.method is None:
        raise UserError(f'"{objective}": its section is no diffrl.config.base.Section with a `method`')
    if not hasattr(kind, "trained_steps"):
        raise UserError(f'"{objective}": its section does not say how many rows an image has (`trained_steps`)')
    if not kind.method.name.isidentifier():
        raise UserError(f'"{objective}": "{kind.method.name}" cannot be the name of a section')
    return kind


def load(objective: str, shipped: Sequence[str] = ()) -> Any:
    """What the name or the path leads to; see `find_outside` for the errors."""
    if ".py" in objective:
        return class_in_file(objective, "objective")
    known = installed()
    if objective not in known:
        hint = nearest(objective, [*shipped, *known])
        raise UserError(f'unknown objective "{objective}"{hint}; one of your own is written path/to/file.py:Class')
    return imported(known[objective], objective)


def imported(path: str, name: str) -> Any:
    """The class `module:Class`; a UserError that names the objective if it cannot be imported."""
    module, _, kind = path.partition(":")
    try:
        return getattr(importlib.import_module(module), kind)
    except Exception as error:
        raise UserError(f'the objective "{name}" ({path}) cannot be imported: {where(error)}') from error
