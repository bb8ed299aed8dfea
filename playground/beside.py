"""Verdicts in processes beside the one that trains.

The verifier is Python and small NumPy calls, so it holds the interpreter: beside a network on a GPU, whose host only
queues kernels, it would hold up sampling (assets/results/rewards_gil.json). Each process has a share of the images, by
their content, so that one that is asked for again is where it was seen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, cast

import numpy as np

log = logging.getLogger(__name__)
FEWEST = 16  # images for which others are asked
MOST = 8  # processes


def spare() -> int:
    """How many processes may score beside this one: of 4 cores and more for each rank, all but one; else none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = cores // max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
    return min(each - 1, MOST) if each >= 4 else 0


class Beside:
    """`number` processes that judge; they end with this one, as their input does."""

    def __init__(self, number: int) -> None:
        command = [
            sys.executable,
            "-c",
            "from diffrl_playground import beside, verifier; beside.serve(verifier.judged)",
        ]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        start = functools.partial(
            subprocess.Popen[bytes], command, stdin=-1, stdout=-1, env=quiet, start_new_session=True
        )
        self.processes = [start() for _ in range(number)]
        self.pipes = [(cast(BinaryIO, one.stdin), cast(BinaryIO, one.stdout)) for one in self.processes]
        self.lock, self.owner = threading.Lock(), os.getpid()

    def verify(self, pixels: np.ndarray, prompts: Sequence[str]) -> list[Any] | None:
        """The verdicts on uint8 (B, H, W, 3), as `verifier.verify` gives them; None where a process is gone."""
        owner = [sum(image[::8, ::8].tobytes()) % len(self.processes) for image in pixels]
        shares = [[i for i, who in enumerate(owner) if who == number] for number in range(len(self.processes))]
        found: dict[int, Any] = {}
        with self.lock:
            try:
                for (requests, _), mine in zip(self.pipes, shares, strict=True):
                    _send(requests, (pixels[mine], [prompts[i] for i in mine]))
                answers = [pickle.load(answer) for _, answer in self.pipes]
            except (OSError, EOFError, pickle.UnpicklingError):
                self.close()
                return None
        for mine, answer in zip(shares, answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            found |= zip(mine, answer, strict=True)
        return [found[i] for i in range(len(pixels))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in (pipe for both in self.pipes for pipe in both):
            with contextlib.suppress(OSError):
                pipe.close()


def serve(judged: Callable[[np.ndarray, Sequence[str]], list[Any]]) -> None:
    """What such a process does: requests come in by its input, verdicts go out, until the input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            request = pickle.load(requests)
            try:
                answer: object = judged(*request)
            except Exception as error:  # a prompt that is not of the world: the asker raises it
                answer = error
            _send(answers, answer)


def _send(pipe: BinaryIO, value: object) -> None:
    pickle.dump(value, pipe, protocol=5)
    pipe.flush()


_others: Beside | None = None
_off = False


def others() -> Beside | None:
    """The processes beside this one, started when they are first asked for; None where there are no cores for them."""
    global _others
    if (_others is None or _others.owner != os.getpid()) and not _off:  # a forked process has its own
        _others = Beside(spare()) if spare() else None
    return _others


def ask(pixels: np.ndarray, prompts: Sequence[str]) -> list[Any] | None:
    """Verdicts by the processes beside this one; None: judge here."""
    global _others, _off
    beside = others() if len(pixels) >= FEWEST else None
    verdicts = beside.verify(pixels, prompts) if beside is not None else None
    if beside is not None and verdicts is None and not _off:
        _others, _off = None, True
        log.warning("a process of the verifier is gone: images are judged in this one, which takes longer")
    return verdicts
