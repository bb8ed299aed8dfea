"""`RUN_DIR/history.jsonl`: every start of a run and what it changed, one JSON object a line, appended."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.records.disk import append_line
from diffrl.records.identity import Identity

if TYPE_CHECKING:
    from diffrl.records.changes import Change

NAME = "history.jsonl"


def started(folder: Path, identity: Identity) -> None:
    """A new run began here."""
    _append(folder, {"event": "started", "identity": identity})


def resumed(folder: Path, epoch: int, changes: Sequence[Change], free: Sequence[Change], **facts: Any) -> None:
    """A run goes on from `epoch`. `changes`: what `--override` allowed; `free`: what a resume may change anyway."""
    event: dict[str, Any] = {"event": "resumed", "epoch": epoch}
    for name, values in (("overridden", changes), ("changed", free)):
        if values:
            event[name] = {change.key: [change.then, change.now] for change in values}
    _append(folder, event | facts)


def saved(folder: Path, step: int) -> None:
    """The run's first checkpoint is on the disk: from here on a folder without one has lost it."""
    if not had_checkpoint(folder):
        _append(folder, {"event": "saved", "step": step})


def had_checkpoint(folder: Path) -> bool:
    """Was there ever a checkpoint? Folders of versions without a history are judged by their LoRA."""
    events = read_history(folder)
    return any(event.get("event") == "saved" for event in events) or (not events and (folder / "lora").is_dir())


def identity_at_start(folder: Path) -> Identity | None:
    """The identity with which the run began; None if the folder has none."""
    identities = [event["identity"] for event in read_history(folder) if isinstance(event.get("identity"), dict)]
    return identities[-1] if identities else None


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The events, oldest first; torn lines are left out."""
    try:
        lines = (folder / NAME).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _append(folder: Path, event: dict[str, Any]) -> None:
    append_line(folder / NAME, json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), **event}))
