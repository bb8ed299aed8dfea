"""`checkpoint.push`: the run is sent to the hub, or to an object store, while it trains."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from diffrl.config import Config
from diffrl.errors import say
from diffrl.files import is_address
from diffrl.pushing.hub import Pusher
from diffrl.records import checkpoint
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import Monitor, RunHook

ALONE, TOGETHER = 90.0, 25.0  # seconds: below Slurm's warning of 120, and below torchrun's 30 to a process's end


class Push(RunHook):
    """Sends the run's folder every so many epochs, from the first process."""

    def __init__(self, config: Config, folder: RunFolder, monitor: Monitor) -> None:
        self.config, self.folder, self.monitor = config, folder, monitor
        self.pusher: Pusher | None = None

    def begin(self, epoch: int) -> None:
        repository = self.config.checkpoint.push
        if self.folder.main and repository is not None:
            self.pusher = Pusher(self.folder.path, repository, self.monitor.note)

    def end_epoch(self, metrics: Mapping[str, Any], last: bool) -> None:
        stored = is_address(str(self.config.checkpoint.push))
        every = self.config.checkpoint.every if stored else self.config.evaluate.every
        if self.pusher is None or not (last or metrics["epoch"] % every == 0):
            return
        if last:
            self.pusher.wait()
        self.pusher.push(metrics["epoch"])
        if last:
            self.monitor.status("sending the run")
            self.pusher.wait()

    def left(self) -> None:
        """Sends what the signal saved, in bounded time."""
        if self.pusher is None or (newest := checkpoint.survey(self.folder.path)[0]) is None:
            return
        seconds = ALONE if os.environ.get("WORLD_SIZE", "1") == "1" else TOGETHER
        end, epoch = time.monotonic() + seconds, checkpoint.epoch_of(newest)
        say(f"diffrl: sending epoch {epoch} to {self.config.checkpoint.push}, within {seconds:.0f} s")
        self.pusher.wait(seconds)
        if self.pusher.sent != epoch:
            self.pusher.push(epoch)
            self.pusher.wait(max(end - time.monotonic(), 0.1))
