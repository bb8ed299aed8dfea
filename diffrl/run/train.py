"""`diffrl train`: from a config to a run folder, with evaluation, checkpoints and an exact resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from diffrl.config import Config
from diffrl.errors import foreign, printable
from diffrl.records.disk import DiskError
from diffrl.run.describe import describe, meanings
from diffrl.run.folder import RunFolder
from diffrl.run.heartbeat import Heartbeat
from diffrl.run.interrupt import Interrupted, Interrupts
from diffrl.run.journal import Journal
from diffrl.run.loop import TrainingError
from diffrl.run.run import Run
from diffrl.run.start import Start, find_start

__all__ = ["Run", "train"]


def train(config: Config, resume: Path | None = None, dry_run: bool = False, override: Sequence[str] = ()) -> None:
    """Run or resume a training; see the module's documentation and `diffrl train --help`.

    `override`: keys in which a resumed run may differ from what its checkpoint was trained with.

    Raises:
        UserError: for what the config asks and cannot be had, before anything is written; for a folder that another
            process writes to, that holds a run (without `resume`), or that has none that could go on (with it).
        RewardError, TrainingError: when the run cannot go on; the last checkpoint is intact.
        Interrupted: by SIGTERM or SIGINT; the epoch that was broken off starts again with --resume.
    """
    folder = RunFolder(Path(config.run_dir) if resume is None else resume, os.environ.get("RANK", "0") == "0")
    if dry_run:
        _dry_run(config, folder, resume is not None, override)
        return
    with folder.held() as owner, Heartbeat(folder) as heartbeat:
        # A new run's folder is looked at by the first process only: it may have begun to write while others start.
        look = folder.main or resume is not None
        start = find_start(config, folder.path, resume is not None, override) if look else Start()
        run = Run(config, folder, heartbeat)
        start.compare(run.identity)
        with _left_intact(run):
            facts = {"device": str(run.policy.device), "processes": run.accelerator.num_processes}
            folder.begin(run.config, start, run.identity, **facts, lower_is_better=sorted(run.lower))
            run.prepare()
            with _interruptible(run, [] if owner is None else [owner.check]):
                with foreign(start.path or folder.path):
                    run.restore(start)
                with (
                    Journal(run.config, folder, run.lower, describe(run) + meanings(run), run.hooks) as journal,
                    run.heartbeat.attribute_errors(),
                ):
                    run.train(journal)


def _dry_run(config: Config, folder: RunFolder, resumed: bool, override: Sequence[str]) -> None:
    from diffrl.run.dry_run import first_scores, without_caches

    folder.check_free()
    start = find_start(config, folder.path, resumed, override)
    run = Run(without_caches(config), folder)
    start.compare(run.identity)
    try:
        if run.main:
            lines = [describe(run), *first_scores(run)]
            Console().print(printable("\n".join(lines)), soft_wrap=True, highlight=False, markup=False)
    finally:
        run.close()


@contextmanager
def _left_intact(run: Run) -> Iterator[None]:
    """However it ends: what the run goes on from is on the disk, and nothing waits to be scored."""
    try:
        yield
    except DiskError as error:
        raise DiskError(f"{error}; {run.folder.intact}") from error
    finally:
        run.close()


@contextmanager
def _interruptible(run: Run, checks: Sequence[Callable[[], None]]) -> Iterator[None]:
    """`checks` may raise, and signals and the other processes' endings do, wherever the run can be left."""
    with Interrupts() as interrupts, run.heartbeat.forward_signals():
        every = [*checks, run.heartbeat.check, interrupts.check]
        run.look_out_for(lambda: [check() for check in every])  # type: ignore[arg-type,return-value]
        try:
            yield
        except (TrainingError, Interrupted) as error:
            run.leave(error)
            raise
