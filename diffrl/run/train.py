"""`diffrl train`: from a config to a run folder, with evaluation, checkpoints and an exact resume."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from diffrl import config as configs
from diffrl.config import Config
from diffrl.errors import UserError, foreign, printable
from diffrl.records import checkpoint, history
from diffrl.records.disk import DiskError, check_writable
from diffrl.records.ownership import Ownership, OwnershipError, holder
from diffrl.records.progress import ProgressTable, summary
from diffrl.records.tracking import Tracker, drop_lines, read_metrics, record_environment
from diffrl.report import write_report
from diffrl.run.assembly import Run
from diffrl.run.direction import direction_metrics, prepare_direction
from diffrl.run.interrupt import Interrupted, Interrupts, Output
from diffrl.run.loop import TrainingError
from diffrl.run.parts import describe
from diffrl.run.start import Start, find_start, free_changes
from diffrl.run.trial import first_scores, without_caches

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
    folder = Path(config.run_dir) if resume is None else resume
    first = os.environ.get("RANK", "0") == "0"
    if dry_run:
        _dry_run(config, folder, resume is not None, override)
        return
    if first:
        check_writable(folder, "run_dir")
    held: AbstractContextManager[Ownership | None] = Ownership(folder) if first else nullcontext()
    with held as owner:
        # A new run's folder is looked at by the first process only: it may have begun to write while others start.
        start = find_start(config, folder, resume is not None, override) if first or resume is not None else Start()
        _train(config, folder, start, owner)


def _dry_run(config: Config, folder: Path, resumed: bool, override: Sequence[str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        check_writable(folder, "run_dir")
        if (who := holder(folder)) is not None:
            raise UserError(f"run_dir: {folder} is in use: {who}")
    start = find_start(config, folder, resumed, override)
    run = Run(without_caches(config))
    run.folder = folder
    start.compare(run.identity)
    try:
        if run.main:
            console = Console()
            lines = [describe(run), *first_scores(run)]
            console.print(printable("\n".join(lines)), soft_wrap=True, highlight=False, markup=False)
    finally:
        run.close()


def _train(config: Config, folder: Path, start: Start, owner: Ownership | None) -> None:
    run = Run(config)
    run.folder = folder
    start.compare(run.identity)
    console = Console(file=Output())  # type: ignore[arg-type]
    try:
        if run.main:
            _record_start(run, start)
        prepare_direction(config, folder, run.policy, run.scorer.rewards, run.spec, run.accelerator)
        with Interrupts() as interrupts:
            run.look_out_for(interrupts.check if owner is None else both(owner.check, interrupts.check))
            try:
                _run(run, console, start)
            except RuntimeError as error:
                # A process that was told to end leaves the others alone in their next exchange, which then fails.
                if interrupts.requested is None or isinstance(error, (TrainingError, DiskError, OwnershipError)):
                    raise
                raise Interrupted(interrupts.requested) from error
    except (TrainingError, Interrupted) as error:
        run.leave(error)
        raise
    except DiskError as error:
        raise DiskError(f"{error}; {run.intact}") from error
    finally:
        run.close()


def both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    """A check that is two checks."""

    def check() -> None:
        first()
        second()

    return check


def _record_start(run: Run, start: Start) -> None:
    """What this start is, before anything is trained: config, environment, history."""
    config, folder = run.config, run.folder
    free = free_changes(config, folder) if start.resumed else []
    configs.dump(config, folder / "config.yaml")  # on a resume too: it may have more epochs
    facts = {"device": str(run.policy.device), "processes": run.accelerator.num_processes}
    record_environment(folder, **facts, lower_is_better=sorted(run.lower))
    if start.then is not None or (start.resumed and start.path is not None):
        epoch = 0 if start.path is None else checkpoint.epoch_of(start.path)
        dropped = drop_lines(folder, after=epoch) if start.changes else 0
        told = {"epochs_dropped": dropped} if dropped else {}
        history.resumed(folder, epoch, start.changes, free, processes=run.accelerator.num_processes, **told)
    else:
        for name in ("metrics.jsonl", history.NAME):  # of a run that died before it trained
            (folder / name).unlink(missing_ok=True)
        history.started(folder, run.identity)


def _run(run: Run, console: Console, start: Start) -> None:
    if start.resumed:
        with foreign(start.path or run.folder):
            run.restore(start)
    run.check_agreement()
    if run.main:
        _lead(run, console)
    else:
        _epochs(run, None, None)


def _lead(run: Run, console: Console) -> None:
    config = run.config
    tracking = config.tracking
    tracker = Tracker(run.folder, tracking.wandb, tracking.tensorboard, config.resolved(), tracking.trackers)
    names = list(config.rewards)
    try:
        console.print(printable(describe(run)), soft_wrap=True, highlight=False, markup=False)
        past = read_metrics(run.folder)
        shown: dict[str, Any] = {"title": str(run.folder), "console": console, "history": past, "lower": run.lower}
        with ProgressTable(config.epochs, names, **shown) as table:
            run.loop.status = table.status
            _epochs(run, tracker, table)
    except BaseException:
        tracker.close()
        with suppress(OSError, UserError, DiskError):  # what ended the run is what is to be told
            _report(run)
        raise
    tracker.close()
    judged = [metrics for metrics in _report(run) if "eval/diversity" in metrics]
    report = (run.folder / "report.html").resolve()
    if judged:
        console.print(summary(judged[0], judged[-1], trained=names, lower=run.lower))
        console.print(
            f"Open {report}", soft_wrap=True, highlight=False, markup=False
        )  # a path broken in two is no path


def _report(run: Run) -> list[dict[str, Any]]:
    """Write the report, if there is something to report; the epochs."""
    past = read_metrics(run.folder)
    if past:
        write_report(run.folder)
    return past


def _epochs(run: Run, tracker: Tracker | None, table: ProgressTable | None) -> None:
    config = run.config
    if run.epoch == 0:
        _baseline(run, tracker, table)
    while run.epoch < config.epochs:
        run.begin_epoch()
        epoch = run.epoch + 1  # epochs are counted from 1; line 0 is the model before training
        metrics = run.loop.run_epoch(run.epoch) | direction_metrics(run.scorer.rewards)
        metrics["epoch"] = epoch
        run.epoch = epoch
        last = epoch == config.epochs
        alarms: list[str] = []
        if epoch % config.evaluate.every == 0 or last:
            alarms = _evaluate(run, metrics, tracker)
        if config.evaluate.divgen and (epoch % config.evaluate.divgen == 0 or last):
            _measure_diversity(run, metrics)
        # The line first, then the checkpoint: killed in between, the epoch is trained again and its line is kept.
        if tracker is not None and table is not None:
            tracker.log(metrics)
            table.add(metrics)
            for text in run.suspicions.after(metrics, run.scorer.take_growth()):
                table.note(text)
        stop = bool(alarms) and config.guard.stop and not last
        if epoch % config.checkpoint.every == 0 or last or stop:
            run.save()
        if tracker is not None and "eval/diversity" in metrics:
            _report(run)
        if table is not None:
            for text in alarms:
                table.note(f"ALARM: {text}")
        if stop:
            if table is not None:
                table.note(f"guard.stop: ended after epoch {epoch}; the last healthy LoRA is {run.folder / 'healthy'}")
            return


def _baseline(run: Run, tracker: Tracker | None, table: ProgressTable | None) -> None:
    """Line 0 of the metrics: the model before training."""
    metrics: dict[str, Any] = {"epoch": 0, "step": 0, "samples": 0}
    _evaluate(run, metrics, tracker)
    if run.divgen is not None:
        _measure_diversity(run, metrics)
    if tracker is not None and table is not None:
        tracker.log(metrics)
        table.add(metrics)


def _evaluate(run: Run, metrics: dict[str, Any], tracker: Tracker | None) -> list[str]:
    """Measure, into `metrics`; returns the guard rails' alarms."""
    mark = time.perf_counter()
    run.loop.status("evaluating")
    metrics |= run.evaluate()
    run.draw_samples(metrics["epoch"], tracker)
    metrics["seconds/evaluate"] = round(time.perf_counter() - mark, 4)
    run.loop.clock.take()  # evaluation's forwards are not the next epoch's
    return run.look_out(metrics)


def _measure_diversity(run: Run, metrics: dict[str, Any]) -> None:
    mark = time.perf_counter()
    run.loop.status("evaluating, DivGenBench")
    metrics |= run.measure_diversity()
    metrics["seconds/evaluate"] = round(metrics.get("seconds/evaluate", 0.0) + time.perf_counter() - mark, 4)
    run.loop.clock.take()
