"""People's votes on a run's groups, on the disk: what is asked, what was answered, and what of that was trained on.

    RUN_DIR/votes/epoch-NNNN/groups.json   what is asked (`diffrl.methods.groups`), with `until`: seconds since 1970
    RUN_DIR/votes/epoch-NNNN/enough        a person has said that the run may go on
    RUN_DIR/votes/epoch-NNNN/closed.json   written once: the run goes on; the votes that count, and their scores
    RUN_DIR/votes/votes.jsonl              every vote, one line each, of the layout that image sets have

The run writes `groups.json` and `closed.json`, and the server of the votes writes the others; so no file has two
writers, and a run on another machine only needs the folder. A resumed run that asks the same again finds the same
groups, by their digests, and counts the same votes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffrl.methods.groups import INDEX, ImageGroup, Listed, epochs_of, read_groups, read_json, write_groups
from diffrl.records.disk import DiskError, inside, write_text, writing

FOLDER, FILE, CLOSED, ENOUGH = "votes", "votes.jsonl", "closed.json", "enough"
MOST = 1000  # votes on a group
PREFERENCE = "preference"  # the scores' name, as in the layouts of image sets


class NotAsked(ValueError):
    """A vote on what no run asks for, or a second one; the message names it."""


@dataclass(frozen=True)
class Asked:
    """An epoch whose groups wait for votes. `until`: seconds since 1970, by the clock of the machine that trains."""

    epoch: int
    groups: list[Listed]
    until: float
    folder: Path


def ask(run_dir: Path, epoch: int, groups: Sequence[ImageGroup], until: float) -> Path:
    """Show the groups, in place of what was asked in this epoch before; returns the epoch's folder."""
    folder = inside(run_dir, FOLDER, f"epoch-{epoch:04d}")
    (folder / CLOSED).unlink(missing_ok=True)
    (folder / ENOUGH).unlink(missing_ok=True)
    write_groups(run_dir, FOLDER, epoch, groups, until=until)
    return folder


def closed(run_dir: Path, epoch: int, groups: Sequence[str]) -> dict[str, Any] | None:
    """How this epoch ended, if it did with these very groups."""
    found = read_json(run_dir / FOLDER / f"epoch-{epoch:04d}" / CLOSED)
    return found if found.get("groups") == list(groups) and isinstance(found.get("votes"), list) else None


def close(run_dir: Path, epoch: int, groups: Sequence[str], counted: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """The run goes on with these votes; images without a vote are removed, being of no later use."""
    folder = inside(run_dir, FOLDER, f"epoch-{epoch:04d}")
    content = {"epoch": epoch, "groups": list(groups), "votes": [vote["vote"] for vote in counted], **facts}
    write_text(folder / CLOSED, json.dumps(content, allow_nan=False) + "\n")
    used = {Path(name).name for vote in read_votes(run_dir) for name in vote["images"]}
    for path in folder.glob("*.png"):
        if path.name not in used:
            path.unlink(missing_ok=True)


def open_epoch(run_dir: Path) -> Asked | None:
    """The newest epoch that waits for votes. A run that ended while it waited waits no more: see `until`."""
    for epoch, folder in epochs_of(run_dir, FOLDER):
        index = read_json(folder / INDEX)
        if not index or (folder / CLOSED).exists():
            continue
        until = index.get("until")
        if isinstance(until, int | float) and until > time.time() - 3600:
            return Asked(epoch, read_groups(folder), float(until), folder)
    return None


def add_vote(run_dir: Path, vote: str, voter: str, group: str, order: Sequence[Sequence[int]]) -> bool:
    """Append a vote; False if this very one is there already, so that a client without an answer may send it again.

    Args:
        vote: its identity, of the sender's choice.
        order: the images' places, best first, those that are equally good together; images left out are below all.

    Raises:
        NotAsked: the group waits for no vote, has a vote of this voter, or has no such images.
        DiskError: nothing was written.
    """
    with _locked(run_dir) as file:
        votes = _parse(_content(file))
        if any(one["vote"] == vote for one in votes):
            return False
        asked = open_epoch(run_dir)
        found = next((one for one in asked.groups if one.identity == group), None) if asked else None
        if asked is None or found is None:
            raise NotAsked("this group is not voted on any more")
        if any(one["group"] == group and one["voter"] == voter for one in votes):
            raise NotAsked("you have voted on this group already")
        if sum(one["group"] == group for one in votes) >= MOST:
            raise NotAsked(f"this group has {MOST} votes")
        places = [place for tier in order for place in tier]
        if len(set(places)) < len(places) or not all(0 <= place < len(found.images) for place in places) or not places:
            raise NotAsked(f"expected places from 0 to {len(found.images) - 1}, each once")
        ranks = [0] * len(found.images)
        for below, tier in enumerate(reversed(order), start=1):
            for place in tier:
                ranks[place] = below
        line = {
            "images": [f"{asked.folder.name}/{name}" for name in found.images],
            "prompt": found.prompt,
            "scores": {PREFERENCE: ranks},
            "vote": vote,
            "voter": voter,
            "group": group,
            "epoch": asked.epoch,
            "time": round(time.time(), 3),
        }
        _append(file, run_dir / FOLDER / FILE, json.dumps(line).encode() + b"\n")
        return True


def go_on(run_dir: Path, epoch: int) -> None:
    """The run need not wait for more votes. Raises NotAsked."""
    asked = open_epoch(run_dir)
    if asked is None or asked.epoch != epoch:
        raise NotAsked("this epoch is not voted on any more")
    with writing(asked.folder / ENOUGH):
        (asked.folder / ENOUGH).touch()


def may_go_on(run_dir: Path, epoch: int) -> bool:
    """Has a person said so?"""
    return (run_dir / FOLDER / f"epoch-{epoch:04d}" / ENOUGH).exists()


def read_votes(run_dir: Path) -> list[dict[str, Any]]:
    """All votes, the oldest first. The end of a line that is being written, or that a kill cut off, is none."""
    try:
        return _parse((run_dir / FOLDER / FILE).read_bytes())
    except OSError:
        return []


def _parse(content: bytes) -> list[dict[str, Any]]:
    votes: dict[str, dict[str, Any]] = {}  # a line that another program has copied is one vote
    for line in content.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
            ranks = row["scores"][PREFERENCE]
            texts = [*row["images"], row["vote"], row["voter"], row["group"], row["prompt"]]
            whole = len(ranks) == len(row["images"]) and all(isinstance(rank, int) for rank in ranks)
            if whole and all(isinstance(text, str) for text in texts):
                votes.setdefault(row["vote"], row)
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return list(votes.values())


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[int]:
    """The file of the votes, locked against other writers."""
    path = inside(run_dir, FOLDER) / FILE
    with writing(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    try:
        with writing(path):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _content(file: int) -> bytes:
    """The whole lines; what a kill left of another one is cut off: no client was told that it was kept."""
    content = os.pread(file, os.fstat(file).st_size, 0)
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.ftruncate(file, whole)
    return content[:whole]


def _append(file: int, path: Path, line: bytes) -> None:
    """A whole line on the disk, or nothing."""
    begin = os.fstat(file).st_size
    try:
        with writing(path):
            if os.write(file, line) != len(line):
                raise OSError(28, "only a part of a line found room")
            os.fsync(file)
    except DiskError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, begin)
        raise
