"""Objectives and advantage rules from outside: in a user's file, or installed (entry points of `GROUPS`).

An objective is its class, whose `section` has its keys and its facts, or that section itself, which names the class
(`method.trainer`): then nothing heavy is imported when a config is read. Shipped objectives are the latter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

from diffrl.config.base import Section
from diffrl.errors import UserError, nearest
from diffrl.resources import class_in_file, where

GROUPS = {"objective": "diffrl.objectives", "advantage rule": "diffrl.advantages"}


def installed(kind: str = "objective") -> dict[str, str]:
    """`module:Class` of everything of a kind that is installed, by its name. Nothing is imported."""
    return {entry.name: entry.value for entry in entry_points(group=GROUPS[kind])}


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
        raise UserError(f'"{objective}": its section is not a diffrl.config.base.Section with a `method`')
    if not hasattr(kind, "trained_steps"):
        raise UserError(f'"{objective}": its section does not say how many rows an image has (`trained_steps`)')
    if not kind.method.name.isidentifier():
        raise UserError(f'"{objective}": "{kind.method.name}" cannot be the name of a section')
    return kind


def load(name: str, shipped: Iterable[str] = (), kind: str = "objective") -> Any:
    """What the name or the path leads to; see `find_outside` for the errors."""
    if ".py" in name:
        return class_in_file(name, kind)
    known = installed(kind)
    if name not in known:
        hint = nearest(name, [*shipped, *known])
        raise UserError(f'unknown {kind} "{name}"{hint}; one of your own is written path/to/file.py:Class')
    return imported(known[name], name, kind)


def imported(path: str, name: str, kind: str = "objective") -> Any:
    """The class `module:Class`; a UserError that names what it is the class of if it cannot be imported."""
    module, _, inner = path.partition(":")
    try:
        return getattr(importlib.import_module(module), inner)
    except Exception as error:
        raise UserError(f'the {kind} "{name}" ({path}) cannot be imported: {where(error)}') from error
