"""What happens when a disk is full or a folder disappears: an error that names the path and what is left."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from diffrl.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMBER = re.compile(r"os error (\d+)")  # at the end of safetensors' messages


class DiskError(RuntimeError):
    """A file cannot be written; the message has the path and the reason, and of a run's also what is intact."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError inside becomes a DiskError at `path`."""
    try:
        yield
    except OSError as error:
        raise DiskError(cannot_write(path, error)) from error
    except SafetensorError as error:  # its writer's way to say that the disk is full
        if (number := _NUMBER.search(str(error))) is None:
            raise
        raise DiskError(cannot_write(path, OSError(int(number[1]), os.strerror(int(number[1]))))) from error


def cannot_write(path: Path, error: OSError) -> str:
    """One line: the path, the reason, and the free room where that is it."""
    reason = error.strerror or str(error)
    free = f" ({shutil.disk_usage(nearest_folder(path)).free / 1e6:,.1f} MB free)" if error.errno in FULL else ""
    if not path.parent.is_dir():
        reason = f"its folder {path.parent} is gone"
    return f"{path}: could not be written: {reason}{free}"


def write_text(path: Path, text: str) -> None:
    """Write the file whole or not at all: a reader, or a process killed in between, never meets half of it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: object, **options: Any) -> None:
    """`write_text` of indented JSON; `options` as `json.dumps` takes them."""
    write_text(path, json.dumps(content, indent=1, **options) + "\n")


def append_line(path: Path, line: str) -> None:
    """A line more, forced to the disk. What a crash or a full disk left of another one stays a line of its own, or this
    one would be lost behind it. DiskError."""
    with writing(path), path.open("ab+") as file:
        torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        file.write(b"\n" * bool(torn) + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[Path]:
    """A file beside `path` for the caller to write, which then takes its place, with the mode that the umask gives.

    After an error it is gone, and `path` is as it was; an OSError becomes a DiskError at `path`. Without `sync` it is
    not forced to the disk: as for pictures. A device or a FIFO stays; of a symbolic link it is the link that goes.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        if kind := special(path):
            raise OSError(errno.EEXIST, f"it is a {kind}, not a file")
        try:
            temporary.touch()
            mode = temporary.stat().st_mode  # by the umask; safetensors' writer makes a private file of its own
            yield temporary
            temporary.chmod(mode)
            if sync:
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def inside(run_dir: str | Path, *names: str) -> Path:
    """A folder in a run's folder, made if it is not there; not the run's own, which is a DiskError if it is gone."""
    folder = Path(run_dir).joinpath(*names)
    with writing(folder):
        Path(run_dir).stat()
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def special(path: Path) -> str:
    """What it is, where it is neither file nor folder nor absent; a link is what it leads to."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    return "FIFO" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"


def check_writable(folder: Path, what: str) -> None:
    """UserError, beginning with `what`, unless files can be written to `folder` or made where it would be.

    Leaves nothing behind: the file that tries it has no name.
    """
    check_name(folder, what)
    taken = next((one for one in (folder, *folder.parents) if os.path.lexists(one) and not one.is_dir()), None)
    if taken is not None:
        kind = special(taken) or "file" if taken.exists() else "link that leads nowhere"
        raise UserError(f'{what}: "{taken}" is a {kind}; name a folder')
    existing = nearest_folder(folder / "file")
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UserError(f"{what}: nothing can be written to {existing} ({reason})") from error


def check_name(path: Path, what: str, beside: str = "") -> None:
    """UserError, beginning with `what`, for a path that no file can have: too long, or with what is no letter of one.

    `beside`: letters that are added to the last name while it is written.
    """
    try:
        sizes = {one: len(os.fsencode(one)) for one in (*path.parts[:-1], path.name + beside)}
        longest = max(sizes, key=lambda one: sizes[one])
        most = os.pathconf(nearest_folder(path), "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
        if sizes[longest] > most:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        os.lstat(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            return  # it is not there, or cannot be looked at
        shown = str(path) if len(str(path)) <= 80 else f"{str(path)[:77]}..."
        raise UserError(
            f'{what}: "{shown}" can be no file\'s name ({getattr(error, "strerror", None) or error})'
        ) from None


def nearest_folder(path: Path) -> Path:
    """The nearest thing above `path` that exists."""
    return next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
