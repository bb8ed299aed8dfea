"""Rewards given as Python objects (functions, classes, objects) by the program that trains or evaluates with them.

A config holds text: `path/to/file.py:NAME` where it stands in a file that can be imported, so that other programs find
it there, too; else `python:NAME`, which is known as long as the program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffrl.errors import UserError, nearest

PREFIX = "python:"
_known: dict[str, tuple[Any, Callable[[Any, bool], str]]] = {}  # each with what digests it


def know(plugin: str, thing: Any, digest: Callable[[Any, bool], str]) -> None:
    """Keep a class or an object under `python:NAME`, or the text that others import it by; it replaces an earlier.

    digest: of its code, and, with True, of the values that its code reads.
    """
    _known[plugin.removeprefix(PREFIX)] = thing, digest


def given(plugin: str) -> Any:
    """What this program has given under the text that others import it by; None: nothing."""
    return _known.get(plugin, (None,))[0]


def is_local(plugin: str) -> bool:
    """Whether a plugin's text names an object of the program."""
    return plugin.startswith(PREFIX)


def knows(plugin: str) -> bool:
    """Whether this program has given `python:NAME`."""
    return plugin.removeprefix(PREFIX) in _known


def forget(plugin: str) -> None:
    """Take `python:NAME` out."""
    _known.pop(plugin.removeprefix(PREFIX), None)


def digest(plugin: str, whole: bool) -> str:
    """What tells the object behind `python:NAME` from another one: its code, and, `whole`, the values that it reads."""
    thing, of = _found(plugin)
    return of(thing, whole)


def find(plugin: str) -> Any:
    """The class or object behind `python:NAME`; UserError if this program has not given it."""
    return _found(plugin)[0]


def _found(plugin: str) -> tuple[Any, Callable[[Any, bool], str]]:
    name = plugin.removeprefix(PREFIX)
    if name not in _known:
        hint = nearest(name, _known) if _known else ""
        text = f'"{plugin}" is an object of the program that used it; give it, as in rewards={{"{name}": ...}}'
        raise UserError(f"{text}{hint}, or put it into a file that can be imported")
    return _known[name]
