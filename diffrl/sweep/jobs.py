"""Commands side by side, a few at a time, each a process of its own: a sweep's runs, an experiment's seeds."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from diffrl.records.lock import holder
from diffrl.run.interrupt import EXIT_CODE, Interrupts

POLL = 0.1  # seconds between two looks at the processes
LOOK = 2.0  # seconds between two looks at a folder that another process holds
TAIL = 4096  # bytes of a log's end in which its last line is looked for


@dataclass(frozen=True)
class Job:
    """One command. `log`: where its output is appended. `folder`: that of a run, which one process at a time may write.

    `done` is called after it has ended with exit code 0.
    """

    name: str
    command: Sequence[str]
    log: Path
    folder: Path | None = None
    done: Callable[[], object] = lambda: None


_print = partial(print, flush=True)


def run_jobs(
    jobs: Iterable[Job], at_once: int, one_thread: bool, report: Callable[[str], object] = _print
) -> list[Job]:
    """Run the commands in their order, `at_once` at a time; the jobs that failed, each reported in one line.

    A job whose folder another process holds, such as one that a killed sweep has left behind, waits for its end in a
    place of its own. With several GPUs each place has one of them.

    Args:
        one_thread: each command computes with one CPU thread; else each takes what it finds.
        report: called with a line when a job begins to wait, and when it ends.

    Raises:
        Interrupted: SIGTERM, SIGINT or SIGHUP, after the commands have been sent SIGTERM and have ended.
    """
    waiting, places = deque(jobs), [_Place(number, gpu, one_thread) for number, gpu in enumerate(_gpus(at_once))]
    total, ended, failed, stopped = len(waiting), 0, [], False
    with Interrupts() as interrupts:
        try:
            while waiting or any(place.job for place in places):
                if interrupts.requested and not stopped:
                    stopped = True
                    waiting.clear()
                    for place in places:
                        place.terminate()
                for place in places:
                    if place.job is None and waiting:
                        place.take(waiting.popleft(), report)
                    job, code = place.look()
                    if job is None or (code is None and stopped):
                        continue
                    if code is None:  # the process that held its folder has ended
                        waiting.appendleft(job)
                        continue
                    ended += 1
                    if code:
                        failed.append(job)
                    else:
                        job.done()
                    report(f"[{ended}/{total}] {job.name}: {_ending(job, code, stopped)}")
                time.sleep(POLL)
        finally:
            for place in places:
                place.terminate()
        interrupts.check()
    return failed


class _Place:
    """One of the `at_once` places: it runs a job, or waits for the process that holds a job's folder."""

    def __init__(self, number: int, gpu: str | None, one_thread: bool) -> None:
        self.job: Job | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._looked = 0.0
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if one_thread else {}
        self._environment = os.environ | threads | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})

    def take(self, job: Job, report: Callable[[str], object]) -> None:
        self.job, self._process, self._looked = job, None, time.monotonic()
        if job.folder is not None and (who := holder(job.folder)):
            report(f"{job.name}: waits, for {who.partition(';')[0]}")
            return
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            self._process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def look(self) -> tuple[Job | None, int | None]:
        """(the job, its exit code) once that has ended; (the job, None) once its folder is free; else (None, None)."""
        job, code = self.job, None
        if job is None:
            return None, None
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return None, None
        elif time.monotonic() - self._looked < LOOK or (job.folder is not None and holder(job.folder)):
            return None, None
        self.job = self._process = None
        return job, code

    def terminate(self) -> None:
        """Ask the command to end: a training saves what it has. Who holds another's folder is left alone."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        elif self._process is None:
            self.job = None


def _gpus(at_once: int) -> list[str | None]:
    """For each place the GPU that it computes on, as CUDA_VISIBLE_DEVICES has it; None: nothing to choose."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if at_once == 1:
        return [None]
    if named is None:
        import torch

        named = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = [gpu for gpu in named.split(",") if gpu]
    return [gpus[i % len(gpus)] if len(gpus) > 1 else None for i in range(at_once)]


def _ending(job: Job, code: int, stopped: bool) -> str:
    if code == 0:
        return "done"
    if code == EXIT_CODE and stopped:
        return "saved"
    return f"failed with exit code {code}{_last_error(job.log)}; log: {job.log}"


def _last_error(log: Path) -> str:
    """What the command said of its end, from its log; "" where it said nothing."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
        lines = file.read().decode(errors="replace").splitlines()
    last = [line.strip() for line in lines if line.strip()][-1:]
    return f" ({last[0].removeprefix('diffrl: error: ')[:200]})" if last else ""
