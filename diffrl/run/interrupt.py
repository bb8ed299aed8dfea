"""What comes from outside while a run trains: signals that end it, and readers of its output that go away.

SIGTERM, SIGINT, SIGHUP, or SIGUSR1 or SIGUSR2, by which clusters warn, ends a run at the next micro-batch, everything
saved, with an exit code of its own. An output without a reader ends nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from diffrl.errors import discard, say

log = logging.getLogger("diffrl")
EXIT_CODE = 75  # "temporary failure, try again" of sysexits.h: a scheduler that re-queues on it goes on with --resume
HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = [signal.Signals[name] for name in NAMES if hasattr(signal, name)]


class Interrupted(Exception):
    """A signal asked the run to end; its checkpoint is written. `signal` is the signal's name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"ended by {name}")
        self.signal = name


class Interrupts:
    """While entered, the first of `SIGNALS` is only noted, and `check` raises; a second SIGINT stops at once. SIGHUP is
    what a closed terminal sends; where it is ignored, as under nohup, it stays so.

    `at_once`: raise Interrupted where the signal comes, as long as there is nothing to save; SIGINT does what it did.
    Outside of the main thread, where Python forbids handlers, signals do what they always did. A fork that a reward
    makes has the handlers, too: SIGTERM ends it, as its maker means (multiprocessing's pools wait for that), and the
    others, which a terminal or a cluster sends to all processes of a group, are the run's own affair.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                ignored = number == HANGUP and signal.getsignal(number) == signal.SIG_IGN
                if ignored or (self.at_once and number == signal.SIGINT):
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.requested = self.requested is None, signal.Signals(number).name
        if self.at_once:
            if first:
                raise Interrupted(self.requested)
            return
        again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
        say(f"\ndiffrl: {self.requested}: ending after this micro-batch{again}")

    def check(self) -> None:
        """Raise Interrupted if a signal came; called where a run can be left."""
        if self.requested is not None:
            raise Interrupted(self.requested)


class Output:
    """Standard output that may lose its reader (`| head`, a dropped connection): what follows is thrown away, and the
    run goes on; the files in its folder tell the same."""

    def write(self, text: str) -> int:
        self._do(lambda: sys.stdout.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(lambda: sys.stdout.flush())

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            discard(sys.stdout)
            reason = error.strerror or str(error)
            log.warning("the output was closed (%s): the run continues without it", reason)
        except ValueError:
            if not sys.stdout.closed:
                raise
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the process's life)
            log.warning("a reward or another plugin has closed the output: the run continues without it")
