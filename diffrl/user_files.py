"""Plugins in a user's Python file: its module, the class or function that is named, and the files beside it.

What lies beside it is found as Python finds it beside a script.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from diffrl.errors import UserError, in_one_line, nearest
from diffrl.files import imports_of
from diffrl.process_state import unchanged_by

_FOLDERS: set[Path] = set()  # of users' files


def load_from_file(kind: str, name: str, fits: Callable[[Any], bool] | None = None) -> Any:
    """NAME of `path/to/file.py:NAME`; see `diffrl.plugins.load`."""
    path, wanted = (name, "") if name.endswith(".py") else name.rsplit(":", 1)
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        siblings = [sibling.name for sibling in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise UserError(f'no {kind} file "{path}"{nearest(file.name, siblings)}')
    module = import_file(file, kind)
    if wanted and hasattr(module, wanted):
        return getattr(module, wanted)
    names = [inner for inner, thing in vars(module).items() if _defined_in(module, thing) and (not fits or fits(thing))]
    if not wanted:
        raise UserError(f'{kind} "{name}": name the class too, as in "{name}:{names[0] if names else "NAME"}"')
    raise UserError(f'no "{wanted}" in {path}{nearest(wanted, names)}')


def import_file(path: Path, kind: str) -> ModuleType:
    """The module in a user's Python file, which is imported once as long as it does not change.

    Raises:
        UserError: what went wrong in the file, and in which line.
    """
    stat = path.stat()
    return _import(path, path.resolve(), kind.replace(" ", "_"), (stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=32)
def _import(path: Path, file: Path, kind: str, version: tuple[int, int]) -> ModuleType:
    _find_siblings(file, kind)
    # A name of its own: two files called reward.py must not replace each other, and pickling and dataclasses need one.
    name = f"diffrl_{kind}_{path.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # nothing is left beside a user's file
    try:
        with unchanged_by(str(path), kind, ", when it is imported,"):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{kind} file {path} cannot be imported: {in_one_line(error, place=True)}") from error
    finally:
        sys.dont_write_bytecode = before
    return module


def _defined_in(module: ModuleType, thing: Any) -> bool:
    """Whether a module defines the class, function or object, and does not import it."""
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return thing.__module__ == module.__name__
    return not inspect.ismodule(thing)


def _find_siblings(file: Path, kind: str) -> None:
    """Let `file` import what lies beside it, now and later: its folder is the last on the path, so that no file there
    hides a package.

    Raises:
        UserError: another user's file has the name of one that it imports.
    """
    names = {name.partition(".")[0] for name in imports_of(file)}
    folder = file.parent
    beside = [n for n in sorted(names) if (folder / f"{n}.py").is_file() or (folder / n / "__init__.py").is_file()]
    if beside and str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    for name in beside:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # of a module without a spec, such as the program's own
            continue
        found = Path((spec.origin if spec else None) or file).resolve()
        home = found.parent.parent if found.name == "__init__.py" else found.parent
        if home != folder and home in _FOLDERS:
            raise UserError(f'{kind} file {file} imports "{name}", which is {found} already: rename one of them')
    if beside:
        _FOLDERS.add(folder)
