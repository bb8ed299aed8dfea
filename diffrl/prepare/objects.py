"""What tells a reward that is an object of the program from another one, as a digest."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffrl.rewards.digests import is_installed


def of_object(thing: Any, whole: bool = False) -> str:
    """What tells a reward that is an object of the program from another one: its code, and, `whole`, the values that
    its code reads: of an object's attributes, of outer functions, of its module."""
    parts: list[str] = []
    seen: dict[int, Any] = {}  # held, or an id would be given again

    def add(value: Any, depth: int = 0) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return parts.append(repr(value))
        parts.append(type(value).__name__)
        if id(value) not in seen and depth < 16:
            seen[id(value)] = value
            for one in _inside(value, whole, parts):
                add(one, depth + 1)
        return None

    add(thing)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _inside(value: Any, whole: bool, parts: list[str]) -> Iterable[Any]:
    """What a value is made of; the text of code, and the bytes of arrays, go to `parts`."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if inspect.ismethod(value):
        return [value.__func__, value.__self__ if whole else type(value.__self__)]
    if inspect.isfunction(value) or inspect.isclass(value):
        if (written := getattr(value, "written", None)) is not None:
            return [written]
        parts.append(f"{value.__module__}.{value.__qualname__}")
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if file is not None and is_installed(Path(file)):  # packages' versions count beside this
            return []
        parts.append(_code(value))
        own = [value] if inspect.isfunction(value) else filter(inspect.isfunction, vars(value).values())
        return [part for one in own for part in _read_by(one)] if whole else []
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, list | tuple | set | frozenset):
        return value if isinstance(value, list | tuple) else sorted(value, key=repr)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        array = value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        parts.append(f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}")
        return []
    if inspect.ismodule(value) or not whole:
        return [] if inspect.ismodule(value) else [type(value)]
    state = value.state_dict() if isinstance(value, torch.nn.Module) else getattr(value, "__dict__", None)
    return [type(value), state]


def _read_by(function: Any) -> list[Any]:
    """Defaults, and what it takes from outer functions and from its module."""
    names = inspect.unwrap(function).__code__.co_names
    scope = function.__globals__
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            cells.append(cell.cell_contents)
    return [function.__defaults__, function.__kwdefaults__, *cells, *[scope[name] for name in names if name in scope]]


def _code(thing: Any) -> str:
    """Its text; of what was typed at a prompt, or made by exec, the bytecode."""
    try:
        if inspect.getfile(thing) == "<string>":  # of every exec; Python 3.13 has the text of `python -c` under it
            raise OSError
        return inspect.getsource(thing)
    except (OSError, TypeError):
        parts = vars(thing).values() if inspect.isclass(thing) else [thing]
        return "\n".join(_bytecode(part.__code__) for part in parts if hasattr(part, "__code__"))


def _bytecode(code: Any) -> str:
    """Instructions, names and constants, those of inner functions included; no addresses."""
    constants = [_bytecode(one) if inspect.iscode(one) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
