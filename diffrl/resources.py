"""Files: where the shipped folders (`configs`, `assets`) are, and a user's own Python files.

The shipped folders lie beside the package in a checkout, inside it in a wheel.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import socket
import sys
import traceback
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from diffrl.errors import UserError, in_one_line, nearest

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str, *parts: str) -> Path:
    """Path of a shipped file or folder, for example `shipped("assets", "playground")`.

    The path is returned whether or not it exists; callers give the message that fits their case.
    """
    checkout = _PACKAGE.parent / folder
    root = checkout if (_PACKAGE.parent / "pyproject.toml").exists() and checkout.exists() else _PACKAGE / f"_{folder}"
    return root.joinpath(*parts)


def shipped_configs() -> list[Path]:
    """The files of the shipped configs, sorted."""
    return sorted(shipped("configs").rglob("*.yaml"))


@functools.cache
def hub_failure() -> str:
    """Why the hub cannot be reached, "" where it can. Then it is read offline: five retries a file take a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(constants.ENDPOINT)
    if url.scheme in urllib.request.getproxies():  # the proxy knows the way, this machine need not
        return ""
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), 5).close()
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        return f"{url.hostname} cannot be reached ({in_one_line(error)})"
    return ""


def hub_file(repository: str, file: str, missing: str) -> Path:
    """A file of a hub repository, in this machine's cache.

    Raises:
        UserError: it is not available; `missing` says what is not here either.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    failure = hub_failure()
    try:
        return Path(hf_hub_download(repository, file))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        reason = failure or in_one_line(error, most=120)
        raise UserError(f"{missing}, and the hub does not give it ({reason})") from error


def file_of_run(run: Path, name: str, what: str) -> Path:
    """The file of a run's folder; UserError if there is no such folder or file."""
    if not run.is_dir():
        folders = [folder.name for folder in run.parent.iterdir() if folder.is_dir()] if run.parent.is_dir() else []
        raise UserError(f'{what}: no folder "{run}"{nearest(run.name, folders)}')
    if not (run / name).is_file():
        raise UserError(f'{what}: "{run}" is not a run\'s folder: it has no {name}')
    return run / name


def import_file(path: Path, kind: str) -> ModuleType:
    """The module in a user's Python file; `kind` ("reward", "extractor") is for messages and the module's name.

    Raises:
        UserError: what went wrong in the file, and in which line.
    """
    # A name of its own: two files called reward.py must not replace each other, and pickling and dataclasses need one.
    name = f"diffrl_{kind}_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # nothing is left beside a user's file
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{kind} file {path} cannot be imported: {where(error)}") from error
    finally:
        sys.dont_write_bytecode = before
    return module


def class_in_file(name: str, kind: str) -> Any:
    """The class `path/to/file.py:Class` of a user's file, which is imported once as long as it does not change.

    Raises:
        UserError: no such file or class, with the nearest one; or what went wrong in the file.
    """
    path, colon, wanted = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise UserError(f'{kind}: expected path/to/file.py:Class, got "{name}"')
    file = Path(path).expanduser()
    if not file.is_file():
        files = [one.name for one in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise UserError(f'{kind}: no file "{path}"{nearest(file.name, files)}')
    module = _imported(file.resolve(), file.stat().st_mtime_ns, kind)
    if not hasattr(module, wanted):
        classes = [one for one, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise UserError(f'{kind}: no class "{wanted}" in {path}{nearest(wanted, classes)}')
    return getattr(module, wanted)


@functools.lru_cache(maxsize=16)
def _imported(file: Path, changed: int, kind: str) -> ModuleType:
    return import_file(file, kind)


def where(error: BaseException) -> str:
    """`TypeError: message (file.py:12)`, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{in_one_line(error)}{place}"
