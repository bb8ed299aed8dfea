"""Which local secrets a config may send to which servers: a recipe is a stranger's text, and is not trusted.

A recipe may name environment variables that begin with `DIFFRL_`. Everything else the user allows, in a file of his own
that no recipe can name: `~/.config/diffrl/settings.yaml`, or the one in the environment variable DIFFRL_SETTINGS:

    variables: [OPENAI_API_KEY]      # that a config may send
    files: [~/.secrets/token]        # that a config may name as token_file
    http: [node7, 10.0.0.5]          # hosts to which secrets may go without encryption
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from diffrl.errors import UserError, nearest
from diffrl.rewards.credentials import PREFIX, redact

KEYS = ("variables", "files", "http")


def settings_file() -> Path:
    """The user's own settings."""
    if given := os.environ.get("DIFFRL_SETTINGS"):
        return Path(given)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "diffrl" / "settings.yaml"


def allowed(kind: str) -> list[str]:
    """The entries of `kind` in the user's settings; UserError, with the file, if it cannot be understood."""
    path = settings_file()
    try:
        names = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    fine = isinstance(names, dict) and all(
        isinstance(entries, list) and all(isinstance(entry, str) for entry in entries) for entries in names.values()
    )
    if not fine:
        raise UserError(f"{path}: expected lists of text under {', '.join(KEYS)}")
    for key in names:
        if key not in KEYS:
            raise UserError(f'{path}: unknown key "{key}"{nearest(str(key), KEYS)}')
    return list(names.get(kind, []))


def variable(name: str, what: str) -> str | None:
    """The environment variable's value, None if it is not set. `what` begins the message of a UserError.

    Raises:
        UserError: a config names a variable that the user did not allow.
    """
    if not name.startswith(PREFIX) and name not in allowed("variables"):
        raise UserError(
            f'{what}: a config may name environment variables that begin with {PREFIX}, and "{name}" does not; '
            f"to allow it, add it to `variables` in {settings_file()}"
        )
    return os.environ.get(name) or None


def check_file(name: str, what: str) -> None:
    """UserError, beginning with `what`, unless the user allowed this file to configs."""
    path = Path(os.path.expanduser(name)).resolve()
    if path not in {Path(os.path.expanduser(entry)).resolve() for entry in allowed("files")}:
        raise UserError(
            f'{what}: a config may not name the file "{name}"; to allow it, add it to `files` in {settings_file()}'
        )


def check_transport(url: str, what: str) -> None:
    """UserError, beginning with `what`, if a secret that is sent to `url` could be read on its way."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https" or is_loopback(host) or host in allowed("http"):
        return
    text = f"{what}: {redact(url)} is not encrypted, and a token would be sent there; use https"
    raise UserError(f'{text}, or add "{host}" to `http` in {settings_file()}')


def is_loopback(host: str) -> bool:
    """Is it an address that this machine alone reaches?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
