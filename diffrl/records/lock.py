"""One run, one folder: a lock that says who writes there, and that a dead process does not keep.

The lock is a lease (filelock's `SoftFileLease`) on the file `RUN_DIR/.lock`, which has host and process, and whose
time is renewed every few seconds. The lock of a dead process of this machine is taken over at once, that of another
machine (a shared disk, a job that was queued again) after `patience` seconds without a renewal. Clocks are never
compared.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout

from diffrl.errors import UserError, say
from diffrl.records.disk import cannot_write

NAME = ".lock"
BEAT, PATIENCE = 2.0, 30.0  # seconds


class LockLostError(RuntimeError):
    """Another process has taken the folder while this one was thought dead."""


class FolderLock:
    """A context manager that holds a run's folder, which it makes.

    Args:
        beat: seconds between two renewals of the lock.
        patience: seconds without a renewal after which a lock may be taken over; the same for all who want it.

    Raises:
        UserError: another process holds the folder; or it cannot be written to.
    """

    def __init__(self, folder: Path, beat: float = BEAT, patience: float = PATIENCE) -> None:
        self.folder, self.path, self.beat, self.patience = folder, folder / NAME, beat, patience
        self._lost = ""
        self._lease = SoftFileLease(
            self.path,
            lease_duration=patience,
            heartbeat_interval=beat,
            on_compromise=self._lose,
            thread_local=False,
        )

    def __enter__(self) -> FolderLock:
        if owner := self.take():
            raise UserError(f"run_dir: {self.folder} is in use: {owner}")
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._lease.release()
            self.folder.rmdir()  # only an empty one: nothing was written, so nothing is left

    def take(self) -> str:
        """Take the folder; its holder if there is one, else ""."""
        first, begun, noted = self._renewed(), time.monotonic(), False

        def alive() -> bool:
            nonlocal noted
            if not noted and time.monotonic() - begun > 2 * self.beat + 1:
                noted = True
                say(f"diffrl: {self.path}: waiting up to {self.patience:g} s for a sign of life")
            return None not in (first, now := self._renewed()) and first != now

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lease.acquire(self.patience + 2 * self.beat, self.beat / 20, cancel_check=alive)
        except Timeout:
            todo = f"wait until it ends, or choose another run_dir (if that machine is dead, delete {self.path})"
            return f"{self._owner()} writes there; {todo}"
        except OSError as error:
            raise UserError(f"run_dir: {cannot_write(self.path, error)}") from error
        return ""

    def check(self) -> None:
        """Raise LockLostError if another process has taken the folder."""
        if self._lost:
            raise LockLostError(self._lost)

    def _renewed(self) -> int | None:
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _owner(self) -> str:
        owner = self._lease.owner
        return "another process" if owner is None else f"process {owner.pid} on {owner.hostname.partition('?')[0]}"

    def _lose(self, loss: LeaseCompromise) -> None:
        if loss.reason == "owner-changed":  # a lock that was deleted, or cannot be renewed, was not taken by anybody
            self._lost = f"{self.folder}: taken by {self._owner()}; this process did not show up for too long"


def renewed(folder: Path) -> bool:
    """Was the folder's lock renewed a moment ago, by the clock of this machine? Touches nothing; for readers."""
    with contextlib.suppress(OSError):
        return abs(time.time() - (folder / NAME).stat().st_mtime) < PATIENCE  # a clock may have gone back
    return False


def holder(folder: Path) -> str:
    """The holder of the folder, "" without one. Nothing stays there; the lock of a dead process goes."""
    if not (folder / NAME).exists():
        return ""
    lock = FolderLock(folder)
    if owner := lock.take():
        return owner
    lock.__exit__()
    return ""
