"""What happens when a disk is full or a folder disappears: an error that names the path and what is left."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from diffrl.errors import UserError


class DiskError(RuntimeError):
    """A file of a run cannot be written; the message has the path, the reason and what is intact."""


@contextlib.contextmanager
def writing(path: Path, intact: str = "") -> Iterator[None]:
    """An OSError inside becomes a DiskError at `path`. `intact`: what of the run is still good, for the message."""
    try:
        yield
    except OSError as error:
        raise DiskError(cannot_write(path, error, intact)) from error


def cannot_write(path: Path, error: OSError, intact: str = "") -> str:
    """One line: the path, the reason, the free room, and what is intact."""
    existing = nearest_folder(path)
    reason = error.strerror or str(error)
    free = f" ({shutil.disk_usage(existing).free / 1e6:,.1f} MB free)"
    if not path.parent.is_dir():
        reason, free = f"its folder {path.parent} is gone", ""
    return f"{path}: could not be written: {reason}{free}" + (f"; {intact}" if intact else "")


def write_text(path: Path, text: str, intact: str = "") -> None:
    """Write the file whole or not at all: a reader, or a process killed in between, never meets half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path, intact):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def check_writable(folder: Path, what: str) -> None:
    """UserError, beginning with `what`, unless files can be written to `folder` or made where it would be.

    Leaves nothing behind: the file that tries it has no name.
    """
    existing = nearest_folder(folder / "file")
    if not existing.is_dir():
        raise UserError(f'{what}: "{existing}" is a file; name a folder')
    if folder.exists() and not folder.is_dir():
        raise UserError(f'{what}: "{folder}" is a file; name a folder')
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UserError(f"{what}: nothing can be written to {existing} ({reason})") from error


def nearest_folder(path: Path) -> Path:
    """The nearest thing above `path` that exists."""
    return next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
