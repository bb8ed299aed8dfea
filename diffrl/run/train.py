"""`diffrl train`: from a config to a run folder, with evaluation, checkpoints and an exact resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from diffrl.config import Config
from diffrl.errors import foreign, printable
from diffrl.records.disk import DiskError
from diffrl.records.ownership import OwnershipError
from diffrl.run.assembly import Run
from diffrl.run.direction import prepare_direction
from diffrl.run.dry_run import first_scores, without_caches
from diffrl.run.folder import RunFolder
from diffrl.run.interrupt import Interrupted, Interrupts
from diffrl.run.journal import Journal
from diffrl.run.loop import TrainingError
from diffrl.run.parts import describe
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
    with folder.held() as owner:
        # A new run's folder is looked at by the first process only: it may have begun to write while others start.
        look = folder.main or resume is not None
        start = find_start(config, folder.path, resume is not None, override) if look else Start()
        run = Run(config, folder)
        start.compare(run.identity)
        try:
            _train(run, start, [] if owner is None else [owner.check])
        except (TrainingError, Interrupted) as error:
            run.leave(error)
            raise
        except DiskError as error:
            raise DiskError(f"{error}; {folder.intact}") from error
        finally:
            run.close()


def _dry_run(config: Config, folder: RunFolder, resumed: bool, override: Sequence[str]) -> None:
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


def _train(run: Run, start: Start, checks: Sequence[Callable[[], None]]) -> None:
    """`checks` may raise, wherever the run can be left."""
    config, folder, accelerator = run.config, run.folder, run.accelerator
    facts = {"device": str(run.policy.device), "processes": accelerator.num_processes}
    folder.begin(config, start, run.identity, **facts, lower_is_better=sorted(run.lower))
    prepare_direction(config, folder.path, run.policy, run.scorer.rewards, run.spec, accelerator)
    with Interrupts() as interrupts:
        run.look_out_for(lambda: [check() for check in (*checks, interrupts.check)])  # type: ignore[arg-type,return-value]
        try:
            with foreign(start.path or folder.path):
                run.restore(start)
            with Journal(config, folder, run.lower, describe(run)) as journal:
                run.train(journal)
        except RuntimeError as error:
            # A process that was told to end leaves the others alone in their next exchange, which then fails.
            if interrupts.requested is None or isinstance(error, (TrainingError, DiskError, OwnershipError)):
                raise
            raise Interrupted(interrupts.requested) from error
