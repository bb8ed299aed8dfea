"""What is told of a run epoch by epoch: the live table and `metrics.jsonl`. Only the main process tells."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diffrl.errors import printable
from diffrl.records.progress import ProgressTable
from diffrl.records.tracking import Tracker
from diffrl.run.describe import describe, meanings
from diffrl.run.interrupt import Output

if TYPE_CHECKING:
    from diffrl.run.run import Run


class RunLogger:
    """Silent on processes that are not the main one. The run's hooks are told of each line, and have the last word."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.console = Console(file=Output())  # type: ignore[arg-type]
        self.tracker: Tracker | None = None
        self.table: ProgressTable | None = None

    def __enter__(self) -> RunLogger:
        run, folder = self.run, self.run.folder
        if not folder.main:
            return self
        for hook in run.hooks:
            hook.before_run()
        self.tracker = Tracker(folder.path)
        try:
            self._say(describe(run).replace("; ", "\n  ") + meanings(run))
            shown: dict[str, Any] = {"console": self.console, "history": folder.lines(), "lower": run.lower}
            self.table = ProgressTable(run.config.epochs, list(run.config.rewards), title=str(folder.path), **shown)
            self.table.__enter__()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.tracker is None:
            return
        if self.table is not None:
            self.table.__exit__(kind, error, at)
        self.tracker.close()
        for hook in self.run.hooks:
            for said in hook.after_run(error):
                self._say(said) if isinstance(said, str) else self.console.print(said)

    def _say(self, text: str) -> None:
        # A path broken in two is no path.
        self.console.print(printable(text), soft_wrap=True, highlight=False, markup=False)

    def log(self, metrics: dict[str, Any]) -> None:
        """An epoch's line."""
        if self.tracker is not None and self.table is not None:
            if (line := self.tracker.log(metrics)) is not None:
                for hook in self.run.hooks:
                    hook.on_line(line)
            self.table.add(metrics)

    def note(self, text: str) -> None:
        if self.table is not None:
            self.table.note(text)

    def status(self, text: str) -> None:
        """What the run is doing now."""
        if self.table is not None:
            self.table.status(text)
