"""The report of a run, written at each evaluation and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffrl.errors import UserError
from diffrl.records.disk import DiskError
from diffrl.report import read_run, warnings_of, write_report
from diffrl.run.build import Build
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import RunHook


class Report(RunHook):
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.whole: Path | None = None  # the page, once the last epoch is in it

    def end_epoch(self, metrics: Mapping[str, Any], last: bool) -> None:
        if self.folder.main and "eval/diversity" in metrics:
            page = write_report(self.folder.path)
            self.whole = page if last else None

    def after_run(self, error: BaseException | None) -> Sequence[str]:
        """The report's own warnings, and where it is."""
        if not self.folder.lines():
            return ()
        if error is not None:
            with suppress(OSError, UserError, DiskError):  # what ended the run is what is to be told
                write_report(self.folder.path)
            return ()
        page = self.whole or write_report(self.folder.path)
        warnings = [f"WARNING: {text}" for text in warnings_of(read_run(self.folder.path))]
        return [*warnings, f"Open {page.resolve()}"]


def add_report(build: Build) -> None:
    build.add(Report(build.folder))
