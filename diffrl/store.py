"""Files at an address of fsspec, such as s3://BUCKET/PATH or gs://, read through a cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, in_one_line
from diffrl.files import cache_folder

VERSION = ("ETag", "etag", "blob_id", "mtime")  # what a store says of a file's content: S3, Google's, the hub, others
PAUSES = (0.5, 2.0, 8.0)  # seconds before a request is made again that a connection or a busy store has failed
LASTING = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)  # no fault of the connection


def opened(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it.

    Raises:
        UserError: the package of this kind of address is not installed, or the address is none.
    """
    import fsspec

    kind = address.partition("://")[0]
    try:
        fs, path = fsspec.core.url_to_fs(address, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        extra = f'; pip install "diffrl[{kind}]"' if kind in ("s3", "gs") else ""
        raise UserError(f'"{address}": {in_one_line(error)}{extra}') from error
    except (ValueError, TypeError) as error:
        raise UserError(f'"{address}": {in_one_line(error, most=200)}') from error
    return fs, str(path).rstrip("/")


def tried(request: Callable[..., Any], *given: Any) -> Any:
    """What the store answers; a whole file is sent or fetched anew where it fails, as many times as PAUSES has."""
    for pause in PAUSES:
        try:
            return request(*given)
        except LASTING:
            raise
        except Exception:  # of whatever kind the store's client makes of a broken connection
            time.sleep(pause)
    return request(*given)


@contextlib.contextmanager
def answering(address: str) -> Iterator[None]:
    """What the store's client raises, which may be anything, as one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f'"{address}" cannot be read ({in_one_line(error, most=200)})') from error


def local(address: str) -> Path:
    """The file or folder of an address in this machine's cache, fetched where it is not there as it is now.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    fs, path = opened(address)
    with answering(address):
        facts_of = {name: info or fs.info(name) for name, info in fs.find(path, detail=True).items()}
        found = {name: info for name, info in facts_of.items() if info["type"] == "file"}
    if not found:
        raise UserError(f'"{address}": there is no such file or folder')
    facts = [[name, info.get("size"), *(str(info.get(key, "")) for key in VERSION)] for name, info in found.items()]
    digest = hashlib.sha256(json.dumps([address, sorted(facts)]).encode()).hexdigest()[:24]
    root = cache_folder() / "store" / digest
    target = root / Path(path).name
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:  # one process of a machine fetches
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = root / "part"
            shutil.rmtree(part, ignore_errors=True)
            with answering(address):
                for name in found:
                    file = part / (Path(name).relative_to(path) if name != path else target.name)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    tried(fs.get_file, name, str(file))
            os.replace(part / target.name if set(found) == {path} else part, target)
    return target
