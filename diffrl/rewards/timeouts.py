"""Calls of other people's code that may hang: made in a daemon thread, which can be waited for and left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from diffrl.plugins import LOADING

Result = TypeVar("Result")
LOOK = 0.1  # seconds between two looks at whether to go on waiting


class TooLong(Exception):
    """A call did not come back in time."""


def call(
    work: Callable[[], Result],
    limit: float | None = None,
    check: Callable[[], object] = lambda: None,
    first: Callable[[], object] = lambda: None,
) -> Future[Result]:
    """`work()` when it is done, as a future with its result or its exception; made in a thread of its own.

    The thread calls `first` before, and ends with the call: an idle thread that has computed keeps its team of OpenMP
    threads, and with more threads than cores OpenMP lets all teams fall asleep at each barrier. Measured on two cores:
    the network's forward and backward pass took 48 ms beside such a thread, 31 ms without, 51 ms on one core.

    Raises TooLong after `limit` seconds, and what `check`, asked all the while, raises. In both cases the thread is
    left behind with the work; hung, it cannot keep the process alive, nor others from loading models. A fork that comes
    back from the work ends there: it would wait for ever for locks of threads that it has not, with all its memory.
    """
    future: Future[Result] = Future()
    process = os.getpid()

    def run() -> None:
        try:
            first()
            result = work()
        except BaseException as error:  # also an exit that the work asks for: it must not end silently
            _end_fork(process)
            future.set_exception(error)
        else:
            _end_fork(process)
            future.set_result(result)

    thread = threading.Thread(target=run, daemon=True, name="diffrl-reward-call")
    thread.start()
    end = None if limit is None else time.monotonic() + limit
    try:
        while not wait([future], LOOK if end is None else max(min(LOOK, end - time.monotonic()), 0.0)).done:
            if end is not None and time.monotonic() >= end:
                raise TooLong
            check()
    except BaseException:
        LOADING.take_from(thread)
        raise
    thread.join()
    return future


def _end_fork(process: int) -> None:
    if os.getpid() != process:
        os._exit(0)
