"""Where a run begins: in an empty folder, at a checkpoint of the same run, or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diffrl.config import Config, door
from diffrl.config.reward import read_on_training_images
from diffrl.errors import UserError
from diffrl.records import history
from diffrl.records.identity import Identity, identity_of_config
from diffrl.records.tracking import read_metrics

if TYPE_CHECKING:
    from diffrl.records.changes import Change


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
    from diffrl.run.past import find_past

    return Start(True, *find_past(config, folder, config_identity(config), override, stateful()), override)


def config_identity(config: Config) -> Identity:
    """The part of a run's identity that its config has by itself."""
    return identity_of_config(config.resolved(), read_on_training_images(config))
