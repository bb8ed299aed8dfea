"""A run at an address of fsspec (`diffrl.store`): sent in a training, fetched to go on elsewhere.

A run that is sent is whole or not there: every push is a folder of its own below `pushes/`, and `current.json`, which
is written last, in one request, names the newest that is complete, with size and SHA-256 of each of its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from diffrl.errors import UserError
from diffrl.files import sha256
from diffrl.store import answering, opened, tried

CURRENT, PUSHES = "current.json", "pushes"
KEPT = 2  # pushes: the one before is being read, perhaps, while a new one is named


def send(address: str, staged: Path, epoch: int) -> None:
    """Send the folder `staged` as the run's newest push. Raises what the store's client does; then it is as it was."""
    fs, path = opened(address)
    name = f"{epoch:06d}-{uuid.uuid4().hex[:8]}"
    files = {}
    for file in sorted(file for file in staged.rglob("*") if file.is_file()):
        relative = file.relative_to(staged).as_posix()
        files[relative] = [file.stat().st_size, sha256(file)]
        tried(fs.put_file, str(file), f"{path}/{PUSHES}/{name}/{relative}")
    table = {"push": name, "epoch": epoch, "files": files}
    tried(fs.pipe_file, f"{path}/{CURRENT}", json.dumps(table, indent=1).encode())
    older = sorted(str(one).rstrip("/") for one in tried(fs.ls, f"{path}/{PUSHES}", False))
    for one in older[:-KEPT]:
        if not one.endswith(name):
            fs.rm(one, recursive=True)


def current(address: str) -> dict[str, Any] | None:
    """The table of the newest complete push; None where no run is."""
    fs, path = opened(address)
    with answering(address):
        try:
            return dict(json.loads(tried(fs.cat_file, f"{path}/{CURRENT}")))
        except FileNotFoundError:
            return None


def fetch(address: str, folder: Path) -> None:
    """The newest complete push as the new folder `folder`, which is whole or not there.

    Raises:
        UserError: there is no run, or a file of it is not what was sent.
    """
    table = current(address)
    if table is None:
        raise UserError(f"--resume: {address} has no run")
    fs, path = opened(address)
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for relative, (size, digest) in table["files"].items():
            file = part / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            with answering(f"{address}/{PUSHES}/{table['push']}/{relative}"):
                tried(fs.get_file, f"{path}/{PUSHES}/{table['push']}/{relative}", str(file))
            if file.stat().st_size != size or sha256(file) != digest:
                raise UserError(f"--resume: {address}/{PUSHES}/{table['push']}/{relative} is not what was sent")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # an empty one
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
