"""One run, one folder: a lock that says who writes there, and that a dead process does not keep.

The lock is the file `RUN_DIR/.lock` with host, process and command, whose time is renewed every few seconds. On the
same machine a lock is judged by its process. From another machine (a shared disk, a job that was queued again) it is
watched: if its time does not change for `patience` seconds, its owner is dead. Clocks are never compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from diffrl.errors import UserError
from diffrl.records.disk import cannot_write

NAME = ".lock"
BEAT, PATIENCE = 5.0, 30.0  # seconds


class OwnershipError(RuntimeError):
    """Another process has taken the folder while this one was thought dead."""


class Ownership:
    """A context manager that holds a run's folder, which it makes.

    Args:
        beat: seconds between two signs of life.
        patience: how long a lock of another machine is watched for one.

    Raises:
        UserError: somebody else holds the folder; or it cannot be written to.
    """

    def __init__(self, folder: Path, beat: float = BEAT, patience: float = PATIENCE) -> None:
        self.folder, self.path, self.beat, self.patience = folder, folder / NAME, beat, patience
        self.token = uuid.uuid4().hex
        self._lost = ""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Ownership:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not self._take():
                seen = _read(self.path)
                if seen is None:
                    continue
                if (reason := alive(self.path, seen, self.patience)) is not None:
                    raise UserError(f"run_dir: {self.folder} is in use: {reason}")
                self._put_aside(seen)
        except OSError as error:
            raise UserError(f"run_dir: {cannot_write(self.path, error)}") from error
        self._thread = threading.Thread(target=self._live, daemon=True, name="diffrl-lock")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            if _token(_read(self.path)) == self.token:
                self.path.unlink()
            self.folder.rmdir()  # only an empty one: nothing was written, so nothing is left

    def check(self) -> None:
        """Raise OwnershipError if another process has taken the folder."""
        if self._lost:
            raise OwnershipError(self._lost)

    def _take(self) -> bool:
        """Make the lock in one step, with its content; False if there is one."""
        temporary = self.folder / f"{NAME}-{self.token}"
        temporary.write_text(json.dumps({"token": self.token, **_whoami()}) + "\n")
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if self.path.exists():
                return False
            os.rename(temporary, self.path)
            return True
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _put_aside(self, seen: bytes) -> None:
        """Remove the dead process's lock, unless somebody was faster and this one is new."""
        aside = self.folder / f"{NAME}-dead-{self.token}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if aside.read_bytes() != seen:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self.path)
            aside.unlink()

    def _live(self) -> None:
        missing = 0
        while not self._end.wait(self.beat):
            try:
                content = _read(self.path)
                if content is not None and _token(content) != self.token:
                    owner = _describe(content)
                    self._lost = f"{self.folder}: taken by {owner}; this process did not show up for too long"
                    return
                missing = missing + 1 if content is None else 0
                if content is not None:
                    os.utime(self.path)
                elif missing > 1 and self.folder.is_dir():
                    self._take()
            except OSError:  # a disk that is away for a while, or a deleted folder: who writes there will say so
                continue


def holder(folder: Path, patience: float = PATIENCE) -> str | None:
    """Who holds the folder, or None; nothing is written."""
    seen = _read(folder / NAME)
    return None if seen is None else alive(folder / NAME, seen, patience)


def alive(path: Path, seen: bytes, patience: float) -> str | None:
    """None if the owner of a lock is dead, else who it is and what to do. Locks of other machines are watched."""
    try:
        owner: dict[str, Any] = json.loads(seen)
        here = owner["place"] == _place()
        pid, started = int(owner["pid"]), float(owner["started"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return _watched(path, patience, f"{path} is not a lock of this version; delete it if nobody writes there")
    todo = "wait until it ends, or choose another run_dir"
    if here:
        return f"{_describe(seen)}; {todo}" if _runs(pid, started) else None
    return _watched(path, patience, f"{_describe(seen)}; {todo} (if that machine is dead, delete {path})")


def _watched(path: Path, patience: float, text: str) -> str | None:
    """`text` if the lock shows a sign of life within `patience` seconds."""
    try:
        first, end = path.stat().st_mtime_ns, time.monotonic() + patience
        if patience >= 1:
            sys.stderr.write(f"diffrl: {path} is of another machine; waiting up to {patience:g} s for a sign of life\n")
        while time.monotonic() < end:
            time.sleep(min(1.0, patience / 10))
            if path.stat().st_mtime_ns != first:
                return text
    except FileNotFoundError:  # released meanwhile
        pass
    return None


def _runs(pid: int, started: float) -> bool:
    """Is this the process that it was then, and no zombie?"""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # not ours to ask
        return True


def _whoami() -> dict[str, Any]:
    process = psutil.Process()
    return {
        "place": _place(),
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "program": shlex.join([Path(word).name for word in sys.argv[:2]]),
    }


def _place() -> str:
    """Where process numbers mean the same: the machine since its start, and the container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _token(content: bytes | None) -> str | None:
    try:
        return None if content is None else json.loads(content)["token"]
    except (ValueError, KeyError, TypeError):
        return ""


def _describe(content: bytes) -> str:
    try:
        owner = json.loads(content)
        return f"process {owner['pid']} on {owner['host']} ({owner['program']}) writes there since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process writes there"
