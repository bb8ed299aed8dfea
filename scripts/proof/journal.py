"""What a proof has found so far: one JSON file, written whole after every part, that the next call goes on from."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from diffrl.errors import UserError

Tell = Callable[[dict[str, Any]], None]
LONGEST = 600.0  # seconds that a part may take, whatever the time that is left
FRAMES = 16  # of a failure, the innermost, into the JSON
GRACE = 5.0  # seconds that stay for writing the JSON and the table


@dataclass(frozen=True)
class Part:
    """One piece of the proof. `run` gets the seconds that it may take and whom to tell what it has found so far, and
    returns what goes into the JSON; a UserError is a refusal, which is a result, too."""

    name: str
    run: Callable[[float, Tell], dict[str, Any]]
    seconds: float  # that it takes about; known better once it has run
    network: str = ""  # that it runs on, "" for none of true size
    measured: bool = False  # are the seconds those of a GPU, and no guess?


class TimeUp(BaseException):
    """A part has used its time. Not an Exception: a reward or a trainer must not catch it as a failure of its own."""


class Journal:
    """The JSON file: `head` of this call, and the parts of all calls.

    A part that is "running" in a file that is read was broken off with its process: it is tried again, at the end.
    """

    def __init__(self, path: Path, head: dict[str, Any], digest: str) -> None:
        self.path, self.digest = path, digest
        self.parts: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                self.parts = json.loads(path.read_text())["parts"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise UserError(f"--out {path}: not a file that this command wrote; name another one") from error
        self.head = head

    def done(self, name: str) -> bool:
        """Is the part finished under this code, on this kind of machine?"""
        part = self.parts.get(name, {})
        return part.get("status") in ("done", "refused") and part.get("digest") == self.digest

    def record(self, name: str, **entry: Any) -> None:
        self.parts[name] = entry | {"digest": self.digest}
        self.write()

    def skip(self, name: str, reason: str) -> None:
        """Left for another call; what an earlier one found, under other code, stays as it is."""
        if self.parts.get(name, {}).get("status") not in ("done", "refused"):
            self.record(name, status="skipped", reason=reason)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".unfinished")
        with beside.open("w") as file:
            json.dump({**self.head, "parts": self.parts}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)


def digest_of(paths: Sequence[Path], root: Path, facts: Sequence[str]) -> str:
    """Of the code in `paths` and of what else decides the figures."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    for fact in facts:
        found.update(fact.encode() + b"\0")
    return found.hexdigest()[:16]


def run_parts(
    parts: Sequence[Part],
    journal: Journal,
    seconds: float,
    say: Callable[[str], None],
    networks: Mapping[str, float] | None = None,
    lost: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Run what is not done, each part within its time; those that were broken off or failed before come last.

    Args:
        networks: seconds that making each network takes, for a part that is the first on it.
        lost: can this process use the device no more? It is asked after a part that failed.

    Returns:
        The parts that a new process has to run, since this one has lost the device.
    """
    end, held = time.monotonic() + seconds, ""

    def troubled(part: Part) -> bool:
        before = journal.parts.get(part.name, {})
        return before.get("digest") == journal.digest and before.get("status") in ("running", "failed")

    order = sorted(parts, key=troubled)
    for number, part in enumerate(order):
        if journal.done(part.name):
            continue
        left = end - time.monotonic() - GRACE
        needed = needs(part, held, networks or {}, journal)
        if left <= needed:
            journal.skip(part.name, f"{max(left, 0):.0f} s were left, it takes about {needed:.0f} s: call again")
            continue
        say(f"{part.name} ...")
        _run(part, journal, min(left, LONGEST - GRACE))
        held = part.network or held
        entry = journal.parts[part.name]
        say(f"  {entry['status']} in {entry['seconds']} s {entry.get('reason', '')}".rstrip())
        if entry["status"] == "failed" and lost():
            return [later.name for later in order[number + 1 :]]
    return []


def needs(part: Part, held: str, networks: Mapping[str, float], journal: Journal | None = None) -> float:
    """Seconds that the part takes about, where the network `held` is made already."""
    known = None if journal is None else journal.parts.get(part.name, {}).get("needs")
    if known is not None:
        return float(known)
    return part.seconds + (networks.get(part.network, 0.0) if part.network != held else 0.0)


def plan(parts: Sequence[Part], seconds: float, networks: Mapping[str, float]) -> list[tuple[Part, float, bool]]:
    """Which parts fit into so many seconds, without running any: each with its seconds."""
    left, held, found = seconds - GRACE, "", []
    for part in parts:
        needed = needs(part, held, networks)
        fits = left > needed
        if fits:
            left, held = left - needed, part.network or held
        found.append((part, needed, fits))
    return found


def _run(part: Part, journal: Journal, limit: float) -> None:
    started = time.monotonic()
    journal.record(part.name, status="running")
    entry: dict[str, Any]
    so_far: dict[str, Any] = {}

    def tell(found: dict[str, Any]) -> None:
        so_far.update(found)
        journal.record(part.name, status="running", **so_far)

    try:
        with within(limit):
            entry = {"status": "done", **part.run(limit, tell)}
    except UserError as error:
        entry = {"status": "refused", "reason": str(error)}
    except TimeUp:
        reason = f"broken off after {limit:.0f} s"
        entry = {"status": "part" if so_far else "skipped", **so_far, "reason": reason, "needs": LONGEST / 2}
    except Exception as error:  # a part that fails must not take the others' figures with it
        entry = {"status": "failed", **so_far, "reason": f"{type(error).__name__}: {str(error).strip()[:600]}"}
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        entry["at"] = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    taken = time.monotonic() - started
    if entry["status"] in ("done", "refused"):
        entry["needs"] = round(taken, 1)
    journal.record(part.name, **{**entry, "seconds": round(taken, 1)})


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeUp is raised inside after so many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
