"""What is told of a run epoch by epoch: the live table and `metrics.jsonl`. Only the main process tells."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console

from diffrl.config import Config
from diffrl.errors import printable
from diffrl.records.progress import ProgressTable
from diffrl.records.tracking import Tracker
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import RunHook
from diffrl.run.interrupt import Output


class RunLogger:
    """Silent on processes that are not the main one.

    Args:
        lower: rewards of which a lower score is better.
        headline: what is about to happen.
        hooks: are told of each line, and have the last word.
    """

    def __init__(
        self, config: Config, folder: RunFolder, lower: frozenset[str], headline: str, hooks: Sequence[RunHook] = ()
    ) -> None:
        self.config, self.folder, self.lower, self.headline = config, folder, lower, headline
        self.hooks = hooks
        self.console = Console(file=Output())  # type: ignore[arg-type]
        self.tracker: Tracker | None = None
        self.table: ProgressTable | None = None

    def __enter__(self) -> RunLogger:
        if not self.folder.main:
            return self
        for hook in self.hooks:
            hook.before_run()
        self.tracker = Tracker(self.folder.path)
        try:
            first, *rest = self.headline.split("\n")
            self._say("\n".join([first.replace("; ", "\n  "), *rest]))
            shown: dict[str, Any] = {"console": self.console, "history": self.folder.lines(), "lower": self.lower}
            shown |= {"title": str(self.folder.path)}
            self.table = ProgressTable(self.config.epochs, list(self.config.rewards), **shown)
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
        for hook in self.hooks:
            for said in hook.after_run(error):
                self._say(said) if isinstance(said, str) else self.console.print(said)

    def _say(self, text: str) -> None:
        # A path broken in two is no path.
        self.console.print(printable(text), soft_wrap=True, highlight=False, markup=False)

    def log(self, metrics: dict[str, Any]) -> None:
        """An epoch's line."""
        if self.tracker is not None and self.table is not None:
            if (line := self.tracker.log(metrics)) is not None:
                for hook in self.hooks:
                    hook.on_line(line)
            self.table.add(metrics)

    def note(self, text: str) -> None:
        if self.table is not None:
            self.table.note(text)

    def status(self, text: str) -> None:
        """What the run is doing now."""
        if self.table is not None:
            self.table.status(text)
