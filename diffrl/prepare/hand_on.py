"""A run's folder that not every machine sees: what a resume reads of it goes from the first process to the others.

Only the first process writes a run's folder. On the disk of one machine alone the others lack what they have to
look at when it goes on: then they are given copies, before anything of the run is read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

from diffrl.errors import UserError
from diffrl.records import checkpoint

FILES = ("config.yaml", "metrics.jsonl", "held_out.jsonl", "history.jsonl", "environment.json")
PIECE = 64 << 20  # bytes in one exchange
WHOLE = 1 << 20  # files up to this size are compared byte by byte, larger ones by size: checkpoints check themselves


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def agree(resume: str | None) -> None:
    """UserError where processes were started to go on with different runs: all of them come here, whatever they were
    told, and those of one run alone to `hand_on`."""
    if _alone():
        return
    words = "without --resume" if resume is None else f"with --resume {resume}"
    said: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(said, (words, f"process {os.getpid()} on {socket.gethostname()}"))
    for rank, (its, process) in enumerate(said):
        if its != said[0][0]:
            raise UserError(f"rank {rank} ({process}) was started {its}, rank 0 {said[0][0]}: start all alike")


def hand_on(folder: Path) -> None:
    """Give every machine what the first process has of the run in `folder`; nothing where all see it, or there is none.

    All processes call it together. Raises what writing a file does.
    """
    if _alone():
        return
    main, first = dist.get_rank() == 0, os.environ.get("LOCAL_RANK", "0") == "0"
    table = _sent(_table(folder) if main else None)
    lacks = first and not main and any(_mark(folder / name) != mark for name, mark in table.items())
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, lacks)
    if not any(answers):
        return
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for name in table:
            _send_file(folder / name, part / name if lacks else None, main)
        if lacks:
            for name in table:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(part / name, folder / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    dist.barrier()


def _table(folder: Path) -> dict[str, Any]:
    """What a resume reads, with what tells it from another file; the checkpoint's manifest last."""
    names = [name for name in FILES if (folder / name).is_file()]
    if "config.yaml" not in names:
        return {}
    newest, _ = checkpoint.survey(folder)
    own = [] if newest is None else sorted(newest.iterdir(), key=lambda file: (file.name == "manifest.json", file.name))
    return {name: _mark(folder / name) for name in [*names, *(file.relative_to(folder).as_posix() for file in own)]}


def _mark(file: Path) -> Any:
    try:
        size = file.stat().st_size
        return [size, hashlib.sha256(file.read_bytes()).hexdigest() if size <= WHOLE else None]
    except OSError:
        return None


def _sent(value: Any) -> Any:
    """The first process's value, on all."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _send_file(source: Path, target: Path | None, main: bool) -> None:
    """In pieces; an empty one is the end."""
    stream = source.open("rb") if main else None
    out = None
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        out = target.open("wb")
    try:
        while piece := _sent(stream.read(PIECE) if stream is not None else None):
            if out is not None:
                out.write(piece)
    finally:
        for one in (stream, out):
            if one is not None:
                one.close()
