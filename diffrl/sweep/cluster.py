"""A sweep's runs as jobs of a Slurm cluster, by submitit: one array, so many at a time, queued again when stopped."""

from __future__ import annotations

import functools
import json
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, in_one_line
from diffrl.records.disk import write_json
from diffrl.run.interrupt import Interrupts
from diffrl.sweep.jobs import Job, _ending, _print

_once = functools.cache(logging.getLogger("diffrl").warning)
LOOK = 2.0  # seconds between two looks at the queue
SHARED = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")  # not Slurm's alone
TIMES = 100  # that a run may reach its time limit and go on


class Training:
    """A command in a job. Where the job is stopped, by its time limit or a pre-emption, the command saves, and the job
    is queued again: the same command goes on then."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command, self.log = list(command), log

    def __call__(self) -> int:
        """The command's exit code."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            return self.child.wait()

    def checkpoint(self) -> Any:
        """What is queued again, once the command has saved. Called by a signal in the middle of `wait`."""
        import psutil
        from submitit.helpers import DelayedSubmission

        try:
            child = psutil.Process(self.child.pid)
            child.send_signal(signal.SIGTERM)  # two of them are one
            while child.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
        except psutil.NoSuchProcess:
            pass
        return DelayedSubmission(Training(self.command, self.log))


def run_on_slurm(
    jobs: Sequence[Job], at_once: int, options: Mapping[str, str], out: Path, report: Callable[[str], object] = _print
) -> list[Job]:
    """Have the jobs run, `at_once` at a time; those that failed, each reported in a line.

    Jobs that an earlier start of the sweep has left in the queue are waited for, not sent again. `options`: submitit's,
    such as partition, gpus_per_node, timeout_min. Raises `Interrupted` after the jobs have been cancelled, and
    `UserError` for what Slurm does not take.
    """
    folder, known = out / "slurm", out / "slurm" / "jobs.json"
    numbers: dict[str, str] = json.loads(known.read_text()) if known.is_file() else {}
    queued = _queued()
    numbers = {name: number for name, number in numbers.items() if number in queued}
    new = [job for job in jobs if job.name not in numbers]
    if new:
        numbers |= dict(zip((job.name for job in new), _submit(new, at_once, options, folder), strict=True))
        write_json(known, numbers)
        report(f"{len(new)} jobs of Slurm: {numbers[new[0].name].partition('_')[0]}")
    left, failed, total = list(jobs), list[Job](), len(jobs)
    with Interrupts() as interrupts:
        while left:
            if interrupts.requested:
                subprocess.run(["scancel", *(numbers[job.name] for job in left)], check=False)
                while _queued(set()) & {numbers[job.name] for job in left}:
                    time.sleep(LOOK)
                interrupts.check()
            queued = _queued({*numbers.values()})
            for job in [job for job in left if numbers[job.name] not in queued]:
                left.remove(job)
                code = _code(folder, numbers[job.name])
                if code:
                    failed.append(job)
                else:
                    job.done()
                report(f"[{total - len(left)}/{total}] {job.name}: {_ending(job, code, False)}")
            time.sleep(LOOK if left else 0.0)
    return failed


def _submit(jobs: Sequence[Job], at_once: int, options: Mapping[str, str], folder: Path) -> list[str]:
    """The numbers of the jobs in the queue."""
    import submitit

    given: dict[str, Any] = {"timeout_min": 24 * 60, "name": "diffrl-sweep"}
    for key, value in options.items():
        number = float(value) if value.replace(".", "", 1).isdigit() else value
        number = int(number) if isinstance(number, float) and number.is_integer() else number
        given[key if key in SHARED else f"slurm_{key}"] = number
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=TIMES)
        executor.update_parameters(slurm_array_parallelism=at_once, **given)
        with executor.batch():
            sent = [executor.submit(Training(job.command, job.log.resolve())) for job in jobs]
    except Exception as error:
        raise UserError(f"sweep: --slurm: {in_one_line(error)}") from error
    return [str(job.job_id) for job in sent]


def _queued(otherwise: set[str] | None = None) -> set[str]:
    """The numbers of the jobs that wait or run; `otherwise` (or a UserError) while Slurm's controller starts again."""
    try:
        done = subprocess.run(["squeue", "--me", "-h", "-r", "-o", "%i"], capture_output=True, text=True, check=True)
        return set(done.stdout.split())
    except (OSError, subprocess.CalledProcessError) as error:
        words = " ".join(str(getattr(error, "stderr", None) or error).split())
        if otherwise is None:
            raise UserError(f"sweep: --slurm: squeue does not answer: {words}") from error
        _once("squeue does not answer (%s): it is asked again", words)
        return otherwise


def _code(folder: Path, number: str) -> int:
    """The exit code of a job that has left the queue; 1 where it left no word."""
    import submitit

    job: Any = submitit.SlurmJob(folder=folder, job_id=number, tasks=[0])
    try:
        return int(job.result()) if job.paths.result_pickle.is_file() else 1
    except Exception:  # submitit has written what ended it
        return 1
