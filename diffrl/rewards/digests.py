"""The code that a reward is made of, as a digest: its file with what that imports."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffrl.files import imports_of

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def code_files(source: Path, top: str = "") -> tuple[dict[str, Path], set[str]]:
    """The Python files that make a module, by module names: `source` and what it imports, inside functions too, as far
    as that is not installed; and the top-level names of installed packages that are imported.

    top: a package whose modules count as files wherever they lie, the plugin's own.
    """
    files: dict[str, Path] = {"": source.resolve()}
    installed: set[str] = set()
    waiting = [(source, _package_of(source, top))]
    while waiting:
        file, package = waiting.pop()
        for name in imports_of(file, package):
            found = _origin(name, file)
            if found is None or found in files.values():
                continue
            own = name.partition(".")[0] == top or not is_installed(found)
            if own and name.partition(".")[0] != "diffrl":
                files[name] = found
                waiting.append((found, name if found.name == "__init__.py" else name.rpartition(".")[0]))
            elif name.partition(".")[0] not in sys.stdlib_module_names:
                installed.add(name.partition(".")[0])
    return files, installed


def is_installed(file: Path) -> bool:
    return str(file).startswith(_INSTALLED) or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _package_of(source: Path, top: str) -> str:
    known = [(name, module) for name, module in list(sys.modules.items()) if top and name.startswith(top)]
    names = (name for name, module in known if _same_file(getattr(module, "__file__", None), source))
    name = next(names, "")
    return name if source.name == "__init__.py" else name.rpartition(".")[0]


def _same_file(one: Any, other: Path) -> bool:
    return isinstance(one, str) and os.path.basename(one) == other.name and Path(one).resolve() == other.resolve()


def _origin(name: str, beside: Path) -> Path | None:
    """A module's file; None where there is none, such as of a class."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if module is None:
        parent = sys.modules.get(name.rpartition(".")[0])
        if "." in name and parent is None:
            return None
        with suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(name)
            origin = spec.origin if spec is not None else None
    file = Path(origin).resolve() if isinstance(origin, str) and origin.endswith(".py") else None
    return file if file is None or file.is_file() else None


def code_digest(files: Mapping[str, Path]) -> str:
    """Of the files' names and contents, wherever they lie."""
    total = hashlib.sha256()
    for name, file in sorted(files.items()):
        total.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()
