"""The other processes of a run, as `Run` sees them: none here; `diffrl.ranks` has those that watch each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from diffrl.run.interrupt import Interrupts

if TYPE_CHECKING:
    from accelerate import Accelerator

    from diffrl.run.folder import RunFolder


class Peers:
    """No other process.

    Attributes:
        began: `time.monotonic()` of the start of this process, or of this object.
        folder: of the run, once it is known.
        accelerator: this process's, once it has joined the others.
        lock: held by the thread that writes what a resume needs, or ends this process.
        ended: why this process has to end, once it has; `check` raises it.
        on_failure: keeps what can be kept without the others; None as long as there is nothing.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.folder: RunFolder | None = None
        self.accelerator: Accelerator | None = None
        self.lock = threading.RLock()
        self.ended: Exception | None = None
        self.on_failure: Callable[[Any], None] | None = None

    def check(self) -> None:
        """Raise why this process has to end, if it has to."""
        if self.ended is not None:
            raise self.ended

    def attribute_errors(self) -> contextlib.AbstractContextManager[None]:
        """An error inside of it becomes the cause elsewhere that it follows from, if there is one."""
        return contextlib.nullcontext()

    def forward_signals(self) -> contextlib.AbstractContextManager[None]:
        """While entered a signal ends the run also where Python's handlers do not run."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around what is done before `with peers:`."""
        try:
            with Interrupts(at_once=True) as interrupts, self.forward_signals():
                yield
                interrupts.check()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Tell the others how this process ended."""
