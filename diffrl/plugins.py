"""Plugins: what installed packages offer by entry points, and classes and functions in a user's own file.

A plugin is named by its entry point, by `package:name` where two packages have one of that name, or by
`path/to/file.py:NAME`. Nothing is imported before a plugin is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, in_one_line, nearest

GROUPS = {  # the group of entry points of each kind; the kind is the word for one in messages
    "reward": "diffrl.rewards",
    "reported": "diffrl.reported",
    "reward form": "diffrl.reward_forms",
    "reward kind": "diffrl.reward_kinds",
    "reward option": "diffrl.reward_options",
    "method": "diffrl.methods",
    "objective": "diffrl.methods",
    "section": "diffrl.sections",
    "advantage rule": "diffrl.advantages",
    "sampler": "diffrl.samplers",
    "family": "diffrl.families",
    "world": "diffrl.worlds",
    "LoRA reader": "diffrl.lora_readers",
    "report": "diffrl.report",
    "addition": "diffrl.additions",
    "check": "diffrl.checks",
    "tracker": "diffrl.trackers",
    "engine.base": "diffrl.bases",
    "optimise.micro_batch": "diffrl.micro_batches",
    "model form": "diffrl.model_forms",
    "prompt set": "diffrl.prompts",
    "command": "diffrl.commands",
}
Packages = Mapping[str, Mapping[str, EntryPoint]]


class _Loading:
    """Held by the thread that makes a model, and again by its own calls.

    Diffusers, transformers and accelerate replace functions of torch meanwhile; two threads that do so at once leave
    them replaced, and no model of the process can be loaded any more.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, me))
            self._owner, self._depth = me, self._depth + 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            if self._owner == threading.get_ident():  # unless it was taken away
                self._depth -= 1
                self._release()

    def take_from(self, thread: threading.Thread) -> None:
        """A thread that hangs keeps no other from loading."""
        with self._changed:
            if self._owner == thread.ident:
                self._depth = 0
                self._release()

    def _release(self) -> None:
        if self._depth == 0:
            self._owner = None
            self._changed.notify_all()


LOADING = _Loading()


def installed(kind: str) -> Mapping[str, EntryPoint]:
    """Installed plugins of a kind by name, sorted.

    Where two packages have one of the same name, neither has it: they are called `package:name`.
    """
    return _scan(kind)[1]


def by_package(kind: str) -> Packages:
    """{name: {package: its entry point}} of everything of a kind that is installed."""
    return _scan(kind)[0]


@functools.cache
def _needed() -> dict[str, dict[str, str]]:
    """{group: {name: value}} of diffrl's own entry points as its files have them, where these are a checkout's."""
    try:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return {}
    return project.get("entry-points", {}) if project.get("name") == "diffrl" else {}


def _scan(kind: str) -> tuple[Packages, Mapping[str, EntryPoint]]:
    folders = tuple((folder, os.stat(folder).st_mtime_ns) for folder in sys.path if os.path.isdir(folder))
    return _scanned(entry_points, GROUPS[kind], folders)


@functools.lru_cache(maxsize=32)
def _scanned(
    find: Callable[..., EntryPoints], group: str, folders: tuple[tuple[str, int], ...]
) -> tuple[Packages, Mapping[str, EntryPoint]]:
    """What `find` finds in `folders` (with the time of their last change: a package may be installed meanwhile), by
    package and by name. Cached, because it reads the metadata of every package, and a config has many names."""
    packages: dict[str, dict[str, EntryPoint]] = {}
    for entry in find(group=group):
        package = entry.dist.name if entry.dist is not None else "?"
        # A package that is found twice (a checkout beside its installation) is one: the first on the path counts.
        packages.setdefault(entry.name, {}).setdefault(package, entry)
    for name, value in _needed().get(group, {}).items():  # one that is not found adds nothing, without a word
        own = packages.get(name, {}).get("diffrl")
        if own is None or own.value != value:
            text = f'the installed diffrl is older than its files, it lacks {group} "{name}"'
            raise UserError(f"{text}: pip install --editable .")
    names: dict[str, EntryPoint] = {}
    for name, owners in packages.items():
        for package, entry in owners.items():
            names[name if len(owners) == 1 else f"{package}:{name}"] = entry
    return packages, dict(sorted(names.items()))


def find(kind: str, name: str) -> EntryPoint | None:
    """The entry point of `name` or `package:name`; None if there is none, or several of that name."""
    package, colon, plain = name.rpartition(":")
    return by_package(kind).get(plain, {}).get(package) if colon else installed(kind).get(name)


def unknown(kind: str, name: str, shipped: Iterable[str] = ()) -> str:
    """The message for a name that no plugin has, or that two packages have; `shipped`: names that are none."""
    packages = by_package(kind).get(name, {})
    if len(packages) > 1:
        choices = " or ".join(f'"{package}:{name}"' for package in sorted(packages))
        return f'{kind} "{name}" is in {len(packages)} packages, {" and ".join(sorted(packages))}: write {choices}'
    known = [*shipped, *installed(kind)]
    return f'unknown {kind} "{name}"{nearest(name, known) if known else " (none is installed)"}'


def short_name(name: str) -> str:
    """What a plugin is called beside others: NAME of `path/to/file.py:NAME`."""
    return name.rpartition(":")[2] if is_path(name) else name


def is_path(name: str) -> bool:
    """Whether a plugin's name is one of a file: `path/to/file.py:NAME`, or without NAME, which `load` refuses."""
    return name.endswith(".py") or name.rpartition(":")[0].endswith(".py")


def load(kind: str, name: str, shipped: Iterable[str] = (), fits: Callable[[Any], bool] | None = None) -> Any:
    """The plugin: what its entry point names, or NAME of `path/to/file.py:NAME`.

    fits: which of the things that a file defines a message may propose; without it all.

    Raises:
        UserError: there is none, with the nearest name; it cannot be imported, with the line of the failure.
    """
    if not is_path(name):
        entry = find(kind, name)
        if entry is None:
            text = unknown(kind, name, shipped)
            raise UserError(f'{text}; one of your own is written "path/to/file.py:NAME"')
        return load_value(kind, name, entry.value)
    from diffrl.user_files import load_from_file

    return load_from_file(kind, name, fits)


def load_value(kind: str, name: str, value: str) -> Any:
    """What `module:NAME` (or `module`) leads to; UserError if it cannot be imported. `name`: what messages call it."""
    from diffrl.process_state import unchanged_by

    module, _, inner = value.partition(":")
    try:
        with nullcontext() if module in sys.modules else unchanged_by(name, kind, ", when it is imported,"):
            found = importlib.import_module(module)
        return functools.reduce(getattr, filter(None, inner.split(".")), found)
    except (Exception, SystemExit) as error:
        raise UserError(f'{kind} "{name}" ({value}) cannot be imported: {in_one_line(error, place=True)}') from error


def here(value: Any) -> Any:
    """A value, or the path on this machine of the address (s3://...) that it is."""
    if not isinstance(value, str) or "://" not in value:
        return value
    from diffrl.files import is_address

    if not is_address(value):
        return value
    from diffrl.store import local

    return str(local(value))
