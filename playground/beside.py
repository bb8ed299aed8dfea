"""Verdicts in processes beside the one that trains.

The verifier is Python and small NumPy calls, so it holds the interpreter: beside a network on a GPU, whose host only
queues kernels, it would hold up sampling (assets/results/rewards_gil.json). Each process has a share of the images, by
their content, so that one that is asked for again is where it was seen.
"""

from __future__ import annotations

import contextlib
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
MOST = 8  # processes


def spare() -> int:
    """How many processes may score beside this one: of 4 cores and more for each rank, all but one; else none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = cores // max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
    return min(each - 1, MOST) if each >= 4 else 0


class Beside:
    """`number` processes that judge; they end with this one, as their input does. One asks them at a time."""

    def __init__(self, number: int) -> None:
        code = "from diffrl_playground import beside, verifier; beside.serve(verifier.judged)"
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.processes = [
            subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, env=quiet, start_new_session=True)
            for _ in range(number)
        ]
        self.pipes = [(cast(BinaryIO, one.stdin), cast(BinaryIO, one.stdout)) for one in self.processes]

    def verify(self, pixels: np.ndarray, prompts: Sequence[str]) -> list[Any] | Exception:
        """The verdicts on uint8 (B, H, W, 3), or why there is none. Raises one of `GONE` where a process is gone."""
        owner = [sum(image[::8, ::8].tobytes()) % len(self.processes) for image in pixels]
        shares = [[i for i, who in enumerate(owner) if who == number] for number in range(len(self.processes))]
        for (requests, _), mine in zip(self.pipes, shares, strict=True):
            _send(requests, (pixels[mine], [prompts[i] for i in mine]))
        found: dict[int, Any] = {}
        answers = [pickle.load(answer) for _, answer in self.pipes]
        for mine, answer in zip(shares, answers, strict=True):
            if isinstance(answer, Exception):
                return answer
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


GONE = (OSError, EOFError, pickle.UnpicklingError)
_others: Beside | None = None
_off = False
_asking = threading.Lock()


def _forget() -> None:
    """A forked process has others of its own."""
    global _others, _asking
    _others, _asking = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def ask(pixels: np.ndarray, prompts: Sequence[str]) -> list[Any] | None:
    """Verdicts by the processes beside this one, started when they are first asked; None: judge here."""
    global _others, _off
    if not spare():
        return None
    with _asking:
        if _off:
            return None
        beside, _others = _others or Beside(spare()), None  # interrupted, it has answers left: it is not asked again
        try:
            verdicts = beside.verify(pixels, prompts)
        except GONE:
            beside.close()
            _off = True
            log.warning("a process of the verifier is gone: images are judged in this one, which takes longer")
            return None
        _others = beside
    if isinstance(verdicts, Exception):
        raise verdicts
    return verdicts
