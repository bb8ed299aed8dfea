"""Files: where the shipped folders (`configs`, `assets`), LoRAs, files of the hub and of a run are.

The shipped folders lie beside the package in a checkout, inside it in a wheel.
"""

from __future__ import annotations

import functools
import socket
import urllib.request
from pathlib import Path
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
