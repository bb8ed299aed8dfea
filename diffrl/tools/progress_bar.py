"""How far a command has come: a bar on a terminal, a line now and then in a log, both on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffrl.records.progress import duration

EVERY = 30.0  # seconds between two lines of a log


@contextmanager
def progress(what: str, total: int, every: float | None = None) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` images are done, on the main process; gives a function that is told of more.

    `every`: seconds between two lines where there is no terminal (None: `EVERY`).
    """
    if os.environ.get("RANK", "0") != "0" or total == 0:
        yield lambda count: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(what, total, EVERY if every is None else every).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class _Lines:
    def __init__(self, what: str, total: int, every: float) -> None:
        self.what, self.total, self.every, self.done = what, total, every, 0
        self.began = self.last_line = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last_line < self.every or self.done >= self.total:
            return
        self.last_line = now
        left = (now - self.began) / max(self.done, 1) * (self.total - self.done)
        sys.stderr.write(f"{self.what}: {self.done} of {self.total} images, {duration(left)} to go\n")
