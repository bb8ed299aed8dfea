"""The door that sections come in by: an entry point of `diffrl.methods` or of `diffrl.sections`, or a user's file.

A method is its section, whose `method` says what it is and names its class (`method.trainer`), so that nothing heavy is
imported when a config is read; or that class, whose `section` it is. Shipped methods are the former. A section of
`diffrl.sections` is no method's, says in `about` what it is, and is on if it is there.
"""

from __future__ import annotations

from typing import Any

from diffrl.config.base import KINDS, Method, Section
from diffrl.errors import UserError, nearest
from diffrl.plugins import installed, is_path, load

SHIPPED = "diffrl."


def place_of(kind: type[Section]) -> int:
    """Where a section stands: objectives come first, what is no method's last."""
    return KINDS.index(kind.method.kind) if kind.method else len(KINDS)


def is_method(name: str) -> bool:
    """Is a method of this name installed?"""
    return name in installed("method")


def is_section(name: str) -> bool:
    """Is a section of this name installed, of a method or not?"""
    return is_method(name) or name in installed("section")


def find_section(name: str) -> type[Section]:
    """The installed one, of a method or not. UserError where it cannot be imported, or does not say what it is."""
    if is_method(name):
        return _section_of(load("method", name), name)
    kind = load("section", name)
    if not (isinstance(kind, type) and issubclass(kind, Section)):
        raise UserError(f'"{name}" is not a diffrl.config.base.Section')
    return kind


def shipped() -> dict[str, type[Section]]:
    """The shipped sections by their names: objectives first, what is put around them and what is no method's last."""
    entries = {**installed("section"), **installed("method")}
    found = {name: find_section(name) for name, entry in entries.items() if entry.value.startswith(SHIPPED)}
    return {name: found[name] for name in sorted(found, key=lambda name: (place_of(found[name]), name))}


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
    kind: type[Section] | None
    if is_path(objective):
        kind = _section_of(load("objective", objective, fits=lambda thing: hasattr(thing, "section")), objective)
    else:
        kind = find_section(objective) if is_method(objective) else None
    if kind is None or kind.method is None or kind.method.kind != "objective":
        others = [name for name, entry in installed("method").items() if not entry.value.startswith(SHIPPED)]
        now = " (it is rwr with rwr.weights: best now)" if objective == "sft" else ""
        hint = now or nearest(objective, [*objectives(), *others])
        raise UserError(f'unknown objective "{objective}"{hint}; one of your own is written path/to/file.py:Class')
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
