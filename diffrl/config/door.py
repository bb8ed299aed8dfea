"""The door that methods and advantage rules come in by: an entry point of `GROUPS`, or a user's file.

A method is its section, whose `method` says what it is and names its class (`method.trainer`), so that nothing heavy is
imported when a config is read; or that class, whose `section` it is. Shipped methods are the former.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from diffrl.config.base import KINDS, Method, Section
from diffrl.errors import UserError, nearest
from diffrl.resources import class_in_file, where

GROUPS = {"objective": "diffrl.methods", "advantage rule": "diffrl.advantages"}
SHIPPED = "diffrl.methods."


def installed(kind: str = "objective") -> dict[str, str]:
    """`module:Class` of everything of a kind that is installed, by its name. Nothing is imported."""
    return _entries(GROUPS[kind], tuple(sys.path))


@functools.cache
def _entries(group: str, path: tuple[str, ...]) -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=group)}


def is_method(name: str) -> bool:
    """Is a method of this name installed?"""
    return name in installed()


def find_method(name: str) -> type[Section]:
    """The section of an installed method.

    Raises:
        UserError: it cannot be imported; it does not say what it is.
    """
    return _section_of(imported(installed()[name], name, "method"), name)


def shipped() -> dict[str, type[Section]]:
    """The sections of all shipped methods by their names: objectives first, what is put around them last."""
    found = {name: find_method(name) for name, path in installed().items() if path.startswith(SHIPPED)}

    def order(name: str) -> tuple[int, str]:
        method = found[name].method
        assert method is not None, "find_method() asks for it"
        return KINDS.index(method.kind), name

    return {name: found[name] for name in sorted(found, key=order)}


def methods() -> dict[str, Method]:
    """What all shipped methods say of themselves, in the order of `shipped`."""
    return {name: kind.method for name, kind in shipped().items() if kind.method is not None}


def objectives() -> list[str]:
    """The names of the shipped objectives."""
    return [name for name, method in methods().items() if method.kind == "objective"]


def find_objective(objective: str) -> type[Section]:
    """The section of an installed objective, or of `path/to/file.py:Class`.

    Raises:
        UserError: there is none, with the nearest name; it cannot be imported; it does not say what it is.
    """
    kind = find_method(objective) if is_method(objective) else _section_of(load(objective), objective)
    assert kind.method is not None, "_section_of() asks for it"
    if kind.method.kind != "objective":
        raise _unknown(objective, "objective")
    if not hasattr(kind, "trained_steps"):
        raise UserError(f'"{objective}": its section does not say how many rows an image has (`trained_steps`)')
    return kind


def method_of(objective: str) -> Method:
    """What an objective says of itself; see `find_objective` for the errors."""
    method = find_objective(objective).method
    assert method is not None, "find_objective() asks for it"
    return method


def _section_of(thing: Any, name: str) -> type[Section]:
    kind = thing if isinstance(thing, type) and issubclass(thing, Section) else getattr(thing, "section", None)
    if kind is None:
        raise UserError(f'"{name}" has no `section`: the class of its keys, with a `method` that says what it is')
    if not (isinstance(kind, type) and issubclass(kind, Section)) or kind.method is None:
        raise UserError(f'"{name}": its section is not a diffrl.config.base.Section with a `method`')
    if not kind.method.name.isidentifier():
        raise UserError(f'"{name}": "{kind.method.name}" cannot be the name of a section')
    return kind


def load(name: str, shipped: Iterable[str] = (), kind: str = "objective") -> Any:
    """What the name or the path leads to; see `find_objective` for the errors."""
    if ".py" in name:
        return class_in_file(name, kind)
    known = installed(kind)
    if name not in known:
        raise _unknown(name, kind, shipped)
    return imported(known[name], name, kind)


def _unknown(name: str, kind: str, shipped: Iterable[str] = ()) -> UserError:
    others = [one for one, path in installed(kind).items() if not path.startswith(SHIPPED)]
    known = [*(objectives() if kind == "objective" else shipped), *others]
    return UserError(f'unknown {kind} "{name}"{nearest(name, known)}; one of your own is written path/to/file.py:Class')


def imported(path: str, name: str, kind: str = "objective") -> Any:
    """The class `module:Class`; a UserError that names what it is the class of if it cannot be imported."""
    module, _, inner = path.partition(":")
    try:
        return getattr(importlib.import_module(module), inner)
    except Exception as error:
        raise UserError(f'the {kind} "{name}" ({path}) cannot be imported: {where(error)}') from error
