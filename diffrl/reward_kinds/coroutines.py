"""Where coroutines run: a reward's own, and the requests to other machines."""

from __future__ import annotations

import asyncio
import os
import threading

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process's coroutines, in a thread that does not keep the process alive. A fork has its own."""
    with _starting:  # several threads may be the first
        if (loop := _loops.get(os.getpid())) is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True, name="diffrl-coroutines").start()
    return loop
