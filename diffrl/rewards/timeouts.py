"""Calls of other people's code that may hang: made in a daemon thread, which can be waited for and left behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

Result = TypeVar("Result")
LOOK = 0.1  # seconds between two looks at whether to go on waiting


class TooLong(Exception):
    """A call did not come back in time."""


class _Thread(Generic[Result]):
    """A daemon thread that works off its queue: hung, it cannot keep the process alive."""

    def __init__(self, first: Callable[[], object]) -> None:
        self.queue: queue.SimpleQueue[tuple[Future[Result], Callable[[], Result]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(first,), daemon=True, name="diffrl-reward-call").start()

    def _run(self, first: Callable[[], object]) -> None:
        first()
        while (job := self.queue.get()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except BaseException as error:  # also an exit that the work asks for: it must not end silently
                future.set_exception(error)
            del future, work, job


class Caller(Generic[Result]):
    """Makes calls one after another in a thread of its own; `first` is what that thread begins with."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self._first = first
        self._thread: _Thread[Result] | None = None

    def wait(
        self, work: Callable[[], Result], limit: float | None = None, check: Callable[[], object] = lambda: None
    ) -> Future[Result]:
        """`work()` when it is done, as a future with its result or its exception.

        Raises TooLong after `limit` seconds, and what `check`, asked all the while, raises. In both cases the thread is
        left behind with the work.
        """
        thread = self._thread = self._thread or _Thread(self._first)
        future: Future[Result] = Future()
        thread.queue.put((future, work))
        end = None if limit is None else time.monotonic() + limit
        try:
            while not wait([future], LOOK if end is None else max(min(LOOK, end - time.monotonic()), 0.0)).done:
                if end is not None and time.monotonic() >= end:
                    raise TooLong
                check()
        except BaseException:
            self.close()
            raise
        return future

    def close(self) -> None:
        """Let the thread end when it has done its work; a later call starts another one."""
        if self._thread is not None:
            self._thread.queue.put(None)
            self._thread = None
