"""Where a run begins: in an empty folder, at a checkpoint of the same run, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from diffrl.config import Config, door
from diffrl.config.reward import read_on_training_images
from diffrl.errors import UserError
from diffrl.records import history
from diffrl.records.identity import FREE, VERSION, Identity, flat, identity_of_config
from diffrl.records.tracking import read_metrics
from diffrl.version import __version__

if TYPE_CHECKING:
    from diffrl.records.changes import Change

log = logging.getLogger("diffrl")


@dataclass
class Start:
    """Where a run begins. `path`: the checkpoint, None for the beginning; `then`: the identity that is compared."""

    resumed: bool = False
    path: Path | None = None
    then: Identity | None = None
    override: Collection[str] = ()
    changes: list[Change] = field(default_factory=list)

    def compare(self, identity: Identity) -> None:
        """Keep what `override` allowed to change; UserError for a change that it did not."""
        if self.then is not None:
            from diffrl.records.changes import compare

            # An earlier version kept no code of watched rewards that training reads.
            newer = {key for key in identity if key.startswith("watch.") and " (" in key} - self.then.keys()
            identity = {key: value for key, value in identity.items() if key not in newer}
            self.changes = compare(self.then, identity, str(self.path or "the run"), self.override, stateful())


def stateful() -> list[str]:
    """The methods that keep a state in checkpoints: no resume switches one on or off."""
    return [name for name, method in door.methods().items() if method.state]


def holds_a_run(folder: Path) -> bool:
    """Has a run trained here? One that died before the end of its first epoch has not."""
    if any((folder / "checkpoints").glob("step-*")) or history.had_checkpoint(folder):
        return True
    return any(line["epoch"] > 0 for line in read_metrics(folder))


def find_start(config: Config, folder: Path, resume: bool, override: Iterable[str] = ()) -> Start:
    """Where the run of this config begins in this folder. Only reads.

    Raises:
        UserError: a new run in a folder that has one; a resume without an intact checkpoint, or of another run.
    """
    override = list(override)
    if not resume:
        if override:
            raise UserError("--override: only a resumed run has a past that differs; give --resume RUN_DIR, too")
        if holds_a_run(folder):
            raise UserError(
                f"run_dir: {folder} already holds a run; continue it with --resume {folder} or choose another"
            )
        return Start()
    from diffrl.records import checkpoint
    from diffrl.records.changes import compare

    path, damaged = checkpoint.survey(folder)
    if path is None:
        _refuse_a_lost_past(folder, damaged)
    for text in damaged:
        log.warning("damaged checkpoint passed over: %s", text)
    then = history.identity_at_start(folder) if path is None else checkpoint.identity_of(path)
    if then is not None:
        # First what the config says by itself: nothing heavy is loaded for a run that cannot go on.
        now = config_identity(config)
        own = {key: value for key, value in then.items() if " (" not in key}
        compare(own, now, str(path or folder), override, stateful())
    start = Start(True, path, then, override)
    if path is not None:
        _look_back(config, folder, path, checkpoint.epoch_of(path))
    return start


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


def config_identity(config: Config) -> Identity:
    """The part of a run's identity that its config has by itself."""
    return identity_of_config(config.resolved(), read_on_training_images(config))


def free_changes(config: Config, folder: Path) -> list[Change]:
    """What the config changes of the last start's `config.yaml` that a resume may change on its own."""
    try:
        before = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return []
    if not isinstance(before, dict):
        return []
    from diffrl.records.changes import Change

    shaping = config_identity(config)
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
