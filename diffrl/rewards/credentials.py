"""Credentials in URLs, which may stand in no config and in no report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from diffrl.errors import UserError

PREFIX = "DIFFRL_"  # of environment variables that a config may name
# What goes before an @ in a URL, and parameters of a query that are secrets by their names.
_USER = re.compile(r"(?<=://)[^/\s@?#]+(?=@)")
_QUERY = re.compile(
    r"(?<=[?&])((?:[\w-]*(?:token|key|secret|password|passwd|signature)|sig|pwd)=)[^&#\s]+", re.IGNORECASE
)


def redact(text: str) -> str:
    """`text` without the credentials of the URLs in it."""
    return _QUERY.sub(r"\1***", _USER.sub("***", text))


def credentials_in(value: Any) -> str | None:
    """The first text in a value, however deep, that is a URL with credentials; as it may be shown."""
    if isinstance(value, str):
        hidden = redact(value)
        return hidden if hidden != value and "://" in value else None
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    return next((credentials for part in parts if (credentials := credentials_in(part)) is not None), None)


def check_no_credentials(value: Any, what: str) -> None:
    """UserError, beginning with `what`, for a URL with credentials: configs and reports are shown to others."""
    if (credentials := credentials_in(value)) is not None:
        raise UserError(
            f"{what}: credentials in a URL ({credentials}) would be written into the run's records; "
            f"give them in an environment variable {PREFIX}... or a file that you allowed"
        )
