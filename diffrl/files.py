"""Names and sums of files: what is an address, where this machine keeps what it fetches, SHA-256, what is imported."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterator
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


def imports_of(file: Path, package: str = "") -> Iterator[str]:
    """The modules that a Python file, of a module in `package`, may import; `from a import b` as both a and a.b."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else str(node.module)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def damage_of(file: Path) -> str:
    """What a file that is named .safetensors is instead of whole weights, as "is cut off: ..."; "" where nothing shows.

    Looked at are its first bytes, its header and its size.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(64)
        length = int.from_bytes(start[:8], "little")
        stream.seek(8)
        header = stream.read(length) if 8 + length <= size else b""
    if not size:
        return "is empty"
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the weights; run git lfs pull in its folder"
    if start.lstrip()[:1] == b"<":
        return "is a web page, not weights: its address wants a login, or a direct link"
    if start[8:9] != b"{" and (start[:2] == b"PK" or start[:1] == b"\x80"):
        return "is a pickle under another name, which is not read"
    if size < 8 or 8 + length > size:
        return f"is cut off, or no safetensors file ({size:,} bytes)"
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "has no readable header: it is damaged, or no safetensors file"
    return f"is cut off: {size:,} of its {whole:,} bytes" if size < whole else ""
