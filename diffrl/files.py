"""Names and sums of files: what is an address, where this machine keeps what it fetches, the SHA-256 of a file."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path


def is_address(text: str) -> bool:
    """Is it an address, such as s3://BUCKET/PATH? Those of servers (http://) are none."""
    return re.match(r"(?!https?:)[a-z][a-z0-9+.-]*://", text) is not None


def cache_folder() -> Path:
    """Where this machine keeps what can be made or fetched again; it need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffrl"


def sha256(file: Path) -> str:
    """Of all bytes of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
