"""Files that a user names to be written: checked before the work begins, and new ones all or none."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from diffrl.errors import UserError
from diffrl.records.disk import DiskError, check_name, check_writable, special, write_text

log = logging.getLogger("diffrl")


def out_file(path: Path, what: str, example: str) -> Path:
    """The file that a user named to be written: where its links lead. That a file is replaced is said.

    Raises:
        UserError: beginning with `what`, for a folder, device or FIFO, which a new file would take the place of, for
            another kind of file than `example` by its name (if that has a suffix), and where nothing can be written.
    """
    check_name(path, what, beside="..tmp")
    if path.is_dir():
        raise UserError(f'{what}: "{path}" is a folder; name a file such as {path / example}')
    if kind := special(path):
        raise UserError(f'{what}: "{path}" is a {kind}; name a file such as {example}')
    if (suffix := Path(example).suffix) and path.suffix not in ("", suffix):
        raise UserError(f'{what}: "{path}": what is written is a {suffix} file; name one such as {example}')
    if path.is_file() and os.environ.get("RANK", "0") == "0":
        log.warning("%s: %s is there already and will be replaced", what, path)
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    check_writable(path.parent, what)
    return path


def write_new(texts: Mapping[Path, str]) -> None:
    """Write all of these files, of which none is there, or leave none: a part would keep the next try from writing."""
    try:
        for path, text in texts.items():
            write_text(path, text)
    except DiskError:
        for path in texts:
            path.unlink(missing_ok=True)
        raise
