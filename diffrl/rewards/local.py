"""Rewards given as Python objects (functions, classes, objects) by the program that trains or evaluates with them.

A config holds text: `path/to/file.py:NAME` where it stands in a file that can be imported, so that other programs find
it there, too; else `python:NAME`, which is known as long as the program runs.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, nearest
from diffrl.rewards.protocol import missing_of_class, missing_of_instance

PREFIX = "python:"
_known: dict[str, Any] = {}


def register(name: str, thing: Any) -> str:
    """Make `thing` known as a reward, in the place of an earlier one of this name; returns its plugin's text.

    `thing`: what `diffrl.rewards.functions.adapt` takes (a class is built with the entry's parameters), or an object
    with the protocol. UserError for anything else.
    """
    from diffrl.rewards.functions import adapt

    if not callable(thing):
        raise UserError(
            f'reward "{name}": a {type(thing).__name__} cannot be called; give a function, a class or an object'
        )
    built = not inspect.isclass(thing) and not missing_of_class(type(thing)) and not missing_of_instance(thing)
    adapted = thing if built else adapt(thing, name)
    place = None if built else _place(thing)
    _known[name] = _known[place or name] = adapted
    return place or PREFIX + name


def _place(thing: Any) -> str | None:
    """`path/to/file.py:NAME` or `module:NAME`, where another program can import it; None: nowhere. A script can be
    imported if it says what it does as a program."""
    module, name = sys.modules.get(getattr(thing, "__module__", None) or ""), getattr(thing, "__qualname__", "")
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not thing or file.suffix != ".py":
        return None
    guard = r"__name__\s*==\s*['\"]__main__"
    if module.__name__ == "__main__" and not re.search(guard, file.read_text(encoding="utf-8", errors="replace")):
        return None
    packaged = "." in module.__name__ or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return f"{module.__name__}:{name}" if packaged else f"{file.resolve()}:{name}"


def given(plugin: str) -> Any:
    """What this program has given under the text that others import it by; None: nothing."""
    return _known.get(plugin)


def is_local(plugin: str) -> bool:
    """Whether a plugin's text names an object of the program."""
    return plugin.startswith(PREFIX)


def knows(plugin: str) -> bool:
    """Whether this program has given `python:NAME`."""
    return plugin.removeprefix(PREFIX) in _known


def forget(plugin: str) -> None:
    """Take `python:NAME` out."""
    _known.pop(plugin.removeprefix(PREFIX), None)


def find(plugin: str) -> Any:
    """The class or object behind `python:NAME`; UserError if this program has not given it."""
    name = plugin.removeprefix(PREFIX)
    if name not in _known:
        hint = nearest(name, _known) if _known else ""
        text = f'"{plugin}" is an object of the program that used it; give it, as in rewards={{"{name}": ...}}'
        raise UserError(f"{text}{hint}, or put it into a file that can be imported")
    return _known[name]
