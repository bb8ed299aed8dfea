"""Pre-emption: SIGTERM or SIGINT ends a run at the next micro-batch, everything saved, with an exit code of its own."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

EXIT_CODE = 75  # "temporary failure, try again" of sysexits.h: a scheduler that re-queues on it goes on with --resume


class Interrupted(Exception):
    """A signal asked the run to end; its checkpoint is written. `signal` is the signal's name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"ended by {name}")
        self.signal = name


class Interrupts:
    """While entered, the first SIGTERM or SIGINT is only noted, and `check` raises; a second SIGINT stops at once.

    Outside of the main thread, where Python forbids handlers, signals do what they always did.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
        sys.stderr.write(f"\ndiffrl: {self.requested}: ending after this micro-batch{again}\n")

    def check(self) -> None:
        """Raise Interrupted if a signal came; called where a run can be left."""
        if self.requested is not None:
            raise Interrupted(self.requested)
