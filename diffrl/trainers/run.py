"""`diffrl train`: from a config to a run folder, with evaluation, checkpoints and an exact resume."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from diffrl import checkpoint
from diffrl import config as configs
from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.progress import ProgressTable, summary
from diffrl.report import write_report
from diffrl.tracking import Tracker, read_metrics, record_environment
from diffrl.trainers.assembly import Run
from diffrl.trainers.d2align import direction_metrics, prepare_direction
from diffrl.trainers.interrupt import Interrupted, Interrupts
from diffrl.trainers.loop import TrainingError
from diffrl.trainers.parts import describe

__all__ = ["Run", "train"]


def train(config: Config, resume: Path | None = None, dry_run: bool = False) -> None:
    """Run or resume a training; see the module's documentation and `diffrl train --help`.

    Raises:
        UserError: for what the config asks and cannot be had, before anything is written.
        RewardError, TrainingError: when the run cannot go on; the last checkpoint is intact.
        Interrupted: by SIGTERM or SIGINT; the epoch that was broken off starts again with --resume.
    """
    folder = Path(config.run_dir) if resume is None else resume
    # Only the first process looks: it may have begun to write while the others still start.
    if resume is None and not dry_run and os.environ.get("RANK", "0") == "0" and checkpoint.holds_a_run(folder):
        raise UserError(f"run_dir: {folder} already holds a run; continue it with --resume {folder} or choose another")
    run = Run(config)
    run.folder = folder
    console = Console()
    if dry_run:
        if run.main:
            console.print(describe(run), soft_wrap=True, highlight=False, markup=False)
        return
    try:
        prepare_direction(config, folder, run.policy, run.scorer.rewards, run.spec, run.accelerator)
        with Interrupts() as interrupts:
            run.loop.check = interrupts.check
            try:
                _run(run, console, resume is not None)
            except RuntimeError as error:
                # A process that was told to end leaves the others alone in their next exchange, which then fails.
                if interrupts.requested is None or isinstance(error, TrainingError):
                    raise
                raise Interrupted(interrupts.requested) from error
    except (TrainingError, Interrupted) as error:
        run.leave(error)
        raise
    finally:
        run.close()


def _run(run: Run, console: Console, resumed: bool) -> None:
    if run.main:
        _lead(run, console, resumed)
        return
    if resumed:
        run.restore()
    run.check_agreement()
    _epochs(run, None, None)


def _lead(run: Run, console: Console, resumed: bool) -> None:
    config = run.config
    run.folder.mkdir(parents=True, exist_ok=True)
    configs.dump(config, run.folder / "config.yaml")  # on a resume too: it may have more epochs
    facts = {"device": str(run.policy.device), "processes": run.accelerator.num_processes}
    record_environment(run.folder, **facts, lower_is_better=sorted(run.lower))
    if resumed:
        run.restore()
    run.check_agreement()
    tracking = config.tracking
    tracker = Tracker(run.folder, tracking.wandb, tracking.tensorboard, config.resolved())
    names = list(config.rewards)
    try:
        console.print(describe(run), soft_wrap=True, highlight=False, markup=False)
        past = read_metrics(run.folder)
        shown: dict[str, Any] = {"title": str(run.folder), "console": console, "history": past, "lower": run.lower}
        with ProgressTable(config.epochs, names, **shown) as table:
            run.loop.status = table.status
            _epochs(run, tracker, table)
    finally:
        tracker.close()
        history = read_metrics(run.folder)
        if history:
            write_report(run.folder)
    judged = [metrics for metrics in history if "eval/diversity" in metrics]
    report = (run.folder / "report.html").resolve()
    if judged:
        console.print(summary(judged[0], judged[-1], trained=names, lower=run.lower))
        console.print(
            f"Open {report}", soft_wrap=True, highlight=False, markup=False
        )  # a path broken in two is no path


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
        stop = bool(alarms) and config.guard.stop and not last
        if epoch % config.checkpoint.every == 0 or last or stop:
            run.save()
        if tracker is not None and "eval/diversity" in metrics:
            write_report(run.folder)
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
