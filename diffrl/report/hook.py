"""The report of a run, written at each evaluation and when it ends, and what the end says on the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from diffrl.errors import UserError
from diffrl.records.disk import DiskError
from diffrl.records.held_out import read_held_out
from diffrl.report import read_run, warnings_of, write_report
from diffrl.report.summary import summary
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook


class Report(RunHook):
    def __init__(self, build: Build) -> None:
        self.build, self.folder = build, build.folder
        self.whole: Path | None = None  # the page, once the last epoch is in it

    def end_epoch(self, metrics: Mapping[str, Any], last: bool) -> None:
        if self.folder.main and "eval/diversity" in metrics:
            page = write_report(self.folder.path)
            self.whole = page if last else None

    def after_run(self, error: BaseException | None) -> Iterator[RenderableType]:
        """What has improved, the report's own warnings, where it is, and what to type next."""
        if not (lines := self.folder.lines()):
            return
        if error is not None:
            with suppress(OSError, UserError, DiskError):  # what ended the run is what is to be told
                write_report(self.folder.path)
            return
        judged = [metrics for metrics in lines if "eval/diversity" in metrics]
        if len(judged) > 1:
            trained, held = list(self.build.config.rewards), read_held_out(self.folder.path)
            yield summary(judged[0], judged[-1], trained=trained, lower=self.build.lower_metrics, held=held)
        page = self.whole or write_report(self.folder.path)
        yield from (f"WARNING: {text}" for text in warnings_of(read_run(self.folder.path)))
        yield f"Open {page.resolve()}"
        if judged:
            run, test = self.folder.path, self.build.config.prompts.test
            prompts = test if isinstance(test, str) else next(iter(test))  # of several sets the first
            words = ["diffrl", "sample", self.build.config.model, "--lora", str(run / "lora"), "--prompts", prompts]
            yield f"Next, a grid of what it draws: {shlex.join([*words, '--limit', '16', '--out', str(run / 'drawn')])}"


def add_report(build: Build) -> None:
    build.add(Report(build))
