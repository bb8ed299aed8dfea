"""What only a run that goes on needs: its past in the folder, and what its config changes of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.records import checkpoint, history
from diffrl.records.changes import Change, compare
from diffrl.records.disk import write_text
from diffrl.records.identity import FREE, VERSION, Identity, flat
from diffrl.records.tracking import read_metrics
from diffrl.version import __version__

log = logging.getLogger("diffrl")


def find_past(
    config: Config, folder: Path, now: Identity, override: Collection[str], stateful: Collection[str]
) -> tuple[Path | None, Identity | None]:
    """The newest intact checkpoint, None before the first one, and the identity of the run there. Only reads.

    `now`: what the config says by itself; nothing heavy is loaded for a run that cannot go on. Raises UserError as
    `diffrl.run.start.find_start` does.
    """
    path, damaged = checkpoint.survey(folder)
    if path is None:
        _refuse_a_lost_past(folder, damaged)
    for text in damaged:
        log.warning("damaged checkpoint passed over: %s", text)
    then = history.identity_at_start(folder) if path is None else checkpoint.identity_of(path)
    if then is not None:
        own = {key: value for key, value in then.items() if " (" not in key}
        compare(own, now, str(path or folder), override, stateful)
    if path is not None:
        _look_back(config, folder, path, checkpoint.epoch_of(path))
    return path, then


def _look_back(config: Config, folder: Path, path: Path, done: int) -> None:
    """UserError for a config that ends before the checkpoint's epoch, `done`; a warning for epochs that `metrics.jsonl`
    has lost."""
    if config.epochs < done:
        raise UserError(f"epochs: {config.epochs}, but {path} has trained {done}; a resume can only add epochs")
    lines = {line["epoch"] for line in read_metrics(folder)}
    if lost := [str(epoch) for epoch in range(1, done + 1) if epoch not in lines]:
        text = f"{folder / 'metrics.jsonl'} has no line of epoch {', '.join(lost[:5])}{' ...' * (len(lost) > 5)}"
        log.warning("%s: the curves have a gap there, the weights do not", text)


def _refuse_a_lost_past(folder: Path, damaged: Sequence[str]) -> None:
    if not damaged and not history.had_checkpoint(folder):
        return  # it died before its first checkpoint: it begins again
    what = f"all {len(damaged)} are damaged: {damaged[0]}" if damaged else f"{folder / 'checkpoints'} has none any more"
    lora = f"; the last LoRA is in {folder / 'lora'}" if (folder / "lora").is_dir() else ""
    raise UserError(
        f"--resume: no intact checkpoint in {folder} ({what}){lora}. Nothing was changed. To start over on "
        f"purpose, move the folder away and run: diffrl train CONFIG run_dir={folder}"
    )


def free_changes(config: Config, folder: Path, shaping: Identity) -> list[Change]:
    """What the config, apart from `shaping`, changes of the last start's `config.yaml`: a resume may do so."""
    try:
        before = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return []
    if not isinstance(before, dict):
        return []
    then, now = flat(before), flat({VERSION: __version__, **config.resolved()})
    return [
        Change(key, then.get(key), now.get(key))
        for key in dict.fromkeys([*then, *now])
        if key not in shaping and _plain_of(then.get(key)) != _plain_of(now.get(key)) and _known(key, then, now)
    ]


def _known(key: str, then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Is this a key that may change freely, or that of a watched reward?"""
    top = key.partition(".")[0]
    return top in ("watch", "rewards") or any(key == name or key.startswith(f"{name}.") for name in FREE)


def _plain_of(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def drop_lines(run_dir: str | Path, after: int) -> int:
    """Take the epochs after `after` out of `metrics.jsonl`, since they will be trained in another way; how many."""
    rows = read_metrics(run_dir)
    remaining = [row for row in rows if row["epoch"] <= after]
    if len(remaining) < len(rows):
        write_text(Path(run_dir) / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in remaining))
    return len(rows) - len(remaining)
