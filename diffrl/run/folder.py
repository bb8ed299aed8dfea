"""A run's folder: who may write to it, and all that is written there but the trackers' lines."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.policy import Policy
from diffrl.records import held_out, history, saving
from diffrl.records.disk import check_writable, inside
from diffrl.records.identity import Identity
from diffrl.records.lock import FolderLock, holder
from diffrl.records.tracking import read_metrics, record_environment
from diffrl.run.start import Start, config_identity

if TYPE_CHECKING:
    from diffrl.records.changes import Change

Tensors = dict[str, dict[str, Tensor]]


class RunFolder:
    """The folder `path`; only the main process writes, on others whatever writes does nothing."""

    def __init__(self, path: Path, main: bool = True) -> None:
        self.path, self.main = path, main

    def check_free(self) -> None:
        """UserError where a run could not write, or another process does."""
        if self.main:
            check_writable(self.path, "run_dir")
            if who := holder(self.path):
                raise UserError(f"run_dir: {self.path} is in use: {who}")

    def held(self) -> AbstractContextManager[FolderLock | None]:
        """While entered no other process writes here. Raises UserError, LockLostError."""
        if not self.main:
            return nullcontext()
        check_writable(self.path, "run_dir")
        return FolderLock(self.path)

    def begin(self, config: Config, start: Start, identity: Identity, **facts: Any) -> None:
        """What this start is, before anything is trained: config, environment (with `facts`), history."""
        if not self.main:
            return
        self.ended(None)
        from diffrl.config import dump

        free: list[Change] = []
        if start.resumed:
            from diffrl.run.past import free_changes

            free = free_changes(config, self.path, config_identity(config))
        dump(config, self.path / "config.yaml")  # on a resume too: it may have more epochs
        record_environment(self.path, **facts)
        if start.then is not None or (start.resumed and start.path is not None):
            from diffrl.records.checkpoint import epoch_of
            from diffrl.run.past import drop_lines

            epoch = 0 if start.path is None else epoch_of(start.path)
            dropped = drop_lines(self.path, after=epoch) if start.changes else 0
            details = {"epochs_dropped": dropped} if dropped else {}
            history.resumed(self.path, epoch, start.changes, free, processes=facts["processes"], **details)
        else:
            for name in ("metrics.jsonl", history.NAME, held_out.NAME):  # of a run that died before it trained
                (self.path / name).unlink(missing_ok=True)
            history.started(self.path, identity)

    def ended(self, code: int | None) -> None:
        """Write the exit code of this start, since launchers end with one of their own. None: it has not ended yet."""
        path = self.path / "exit_code"
        if self.main and self.path.is_dir():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True) if code is None else path.write_text(f"{code}\n")

    def save(self, tensors: Tensors, state: Mapping[str, Any], keep: int, identity: Identity) -> None:
        """A complete checkpoint; `keep`: how many stay."""
        step = state["loop"]["step"]
        inside(self.path, "checkpoints")
        saving.save(self.path, step, tensors, state, keep, identity)
        history.saved(self.path, step)

    def save_lora(self, policy: Policy, snapshot: str) -> None:
        """The LoRA for others to load."""
        if self.main:
            policy.save_lora(self.path / "lora", snapshot)

    def save_held_out(self, held: held_out.HeldOut, epoch: int) -> None:
        """What each held-out prompt scored in this epoch."""
        if self.main:
            held.write(self.path, epoch)

    def lines(self) -> list[dict[str, Any]]:
        """The epochs of `metrics.jsonl`."""
        return read_metrics(self.path)

    @property
    def intact(self) -> str:
        """What of the run is good whatever happens to the file that is being written, for messages."""
        if not self.path.is_dir():
            return "nothing is left"
        from diffrl.records.checkpoint import survey

        path, _ = survey(self.path)
        return "there is no checkpoint" if path is None else f"intact: {path}; continue with --resume {self.path}"
