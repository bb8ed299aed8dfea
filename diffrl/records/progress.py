"""What a run says on the terminal while it trains: a live table, or a line per epoch and one per evaluation."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from diffrl.errors import printable
from diffrl.records.held_out import gain

Metrics = Mapping[str, Any]
PARTS = ("rollout", "decode", "reward", "wait", "advantages", "optimise")  # of an epoch; "wait": for other processes
BETWEEN = ("evaluate", "checkpoint", "texts")  # of a line of the metrics: beside the training of its epoch
# Of an epoch of each of several processes, in their order. What a process waits between rollout and advantages ("wait")
# is for the slowest rollout. What it waits in optimiser steps ("reduce") is seen on a CPU only: an accelerator's
# reductions run beside the host, as a part of "optimise".
PHASES = (*PARTS, "reduce")
LINE = 120  # characters of an epoch's line in a log
_REWARD_WIDTH = 12  # "0.512 +0.031"


class ProgressTable:
    """Shows a run's epochs while it trains; a context manager.

    On a terminal, a table of the last epochs that is redrawn in place, with what the process is doing below it. Else,
    one line per epoch. 80 columns hold three rewards; with more, or in less, the changes give way first.

    Args:
        epochs: how many the run will have. `metrics["epoch"]` counts finished epochs, 0 is the untrained model.
        rewards: names of the trained rewards (`reward/<name>` of the metrics).
        history: epochs of an earlier part of the run (`read_metrics`), so that a resumed run still shows the change
            since its beginning.
        rows: epochs shown at a time.
        lower: names of which lower is better, by their reward's card.
    """

    def __init__(
        self,
        epochs: int,
        rewards: Sequence[str],
        *,
        title: str = "",
        console: Console | None = None,
        history: Iterable[Metrics] = (),
        rows: int = 8,
        lower: Collection[str] = (),
    ) -> None:
        self.epochs, self.rewards, self.title, self.rows = epochs, list(rewards), title, rows
        self.console = console or Console()
        self.metrics: list[Metrics] = list(history)
        self.lower = lower
        self._status = "starting"
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self.__rich__, console=self.console, refresh_per_second=4)

    def __enter__(self) -> ProgressTable:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._status = ""
        self._live.stop()

    def status(self, text: str) -> None:
        """What the process is doing now, for example "sampling 96/192".

        Elsewhere than on a terminal only what comes before the first epoch is said: it can take a minute.
        """
        if not self.console.is_terminal and not self.metrics and text != self._status:
            self.note(f"{text} ...")
        self._status = text

    def note(self, text: str) -> None:
        """A line above the table that stays."""
        self.console.print(printable(text), soft_wrap=True, highlight=False, markup=False)

    def add(self, metrics: Metrics) -> None:
        """Show one more finished epoch."""
        self.metrics.append(metrics)
        if self.console.is_terminal:
            self._live.refresh()
        else:
            self.console.print(self.line(metrics), soft_wrap=True, highlight=False, markup=False)

    def line(self, metrics: Metrics) -> str:
        """One epoch as a line of plain ASCII, and one of its evaluation, each at most `LINE` characters long."""
        ends = [f"epoch {metrics['epoch']}/{self.epochs}", f"images {count(metrics.get('samples'))}"]
        fields = [self._with_change(name, metrics, f"reward/{name}") for name in self.rewards]
        fields = [] if not metrics["epoch"] else fields  # nothing has been trained on yet
        last = [f"diversity {number(metrics['diversity'])}"] if finite(metrics.get("diversity")) else []
        if finite(metrics.get("seconds")):
            last.append(f"{metrics['seconds']:.1f} s")
        last.append(f"ETA {duration(self.remaining())}")
        room = LINE - len("  ".join([*ends, *last, ""]))
        lines = ["  ".join([*ends, *_fitting(fields, "  ", room), *last])]
        keys = sorted(filter(_held_out, metrics), key=lambda key: key[5:] not in self.rewards)
        if keys:
            values = [self._with_change(key[5:], metrics, key) for key in keys]
            lines.append("  held out: " + ", ".join(_fitting(values, ", ", LINE - len("  held out: "))))
        return "\n".join(lines)

    def remaining(self) -> float | None:
        """Seconds that the rest of the run takes at the speed of the last ten epochs, None before the first."""
        recent = [row for row in self.metrics if finite(row.get("seconds"))][-10:]
        if not recent:
            return None
        spent = sum(map(wall, recent))
        return max(self.epochs - self.metrics[-1]["epoch"], 0) * spent / len(recent)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self._table(self.console.width)]
        if held_out := self._held_out():
            parts.append(held_out)
        if self.metrics and finite(self.metrics[-1].get("seconds")):
            last = self.metrics[-1]
            text = f"{last['seconds']:.1f} s an epoch: {split(last)} · {duration(self.remaining())} to go"
            parts.append(Text(text, style="dim"))
        if self._status:
            self._spinner.update(text=Text(self._status, style="dim"))
            parts.append(self._spinner)
        return Group(*parts)

    def _table(self, width: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        if self.title:
            table.title, table.title_style, table.title_justify = self.title, "bold", "left"
        total = len(str(self.epochs))
        fixed = (2 * total + 1, 6, 9, 7)  # epoch, images, diversity, s/epoch
        gap = 2  # one of padding, one of rich's divider
        room = width - sum(fixed) - gap * (len(fixed) - 1)
        changes = len(self.rewards) * (_REWARD_WIDTH + gap) <= room
        each = _REWARD_WIDTH if changes else 7
        shown = self.rewards[: max(room // (each + gap), 1)]
        for name, size in (("epoch", fixed[0]), ("images", fixed[1])):
            table.add_column(name, justify="right", no_wrap=True, min_width=size)
        for name in shown:
            table.add_column(shorten(name, each), justify="right", no_wrap=True, min_width=each)
        table.add_column("diversity", justify="right", no_wrap=True)
        table.add_column("s/epoch", justify="right", no_wrap=True)
        for row in self.metrics[-self.rows :]:
            cells: list[str | Text] = [f"{row['epoch']}/{self.epochs}", count(row.get("samples"))]
            cells += [self._cell(row, f"reward/{name}", changes) for name in shown]
            seconds = row.get("seconds")
            table.add_row(*cells, number(row.get("diversity")), f"{seconds:.1f}" if finite(seconds) else "-")
        if len(shown) < len(self.rewards):
            table.caption = f"and {len(self.rewards) - len(shown)} more rewards in metrics.jsonl"
        return table

    def _cell(self, row: Metrics, key: str, changes: bool) -> Text:
        text = Text(number(row.get(key)))
        if changes and (difference := self._change(row, key)) is not None:
            better = gain(key.partition("/")[2], difference, self.lower)
            text.append(f" {difference:+.3f}", style="green" if better > 0 else "red" if better < 0 else "")
        return text

    def _change(self, row: Metrics, key: str) -> float | None:
        """Change since the first epoch that has the value; None when there is nothing to compare."""
        start = next((earlier for earlier in self.metrics if finite(earlier.get(key))), None)
        if start is None or start is row or not finite(row.get(key)):
            return None
        return float(row[key] - start[key])

    def _with_change(self, name: str, row: Metrics, key: str) -> str:
        difference = self._change(row, key)
        return f"{name} {number(row.get(key))}" + (f" ({difference:+.3f})" if difference is not None else "")

    def _held_out(self) -> RenderableType | None:
        """The last evaluation with its change since the first."""
        row = next((row for row in reversed(self.metrics) if any(map(_held_out, row))), None)
        if row is None:
            return None
        values = [Text(f"{key[5:]} ").append(self._cell(row, key, changes=True)) for key in row if _held_out(key)]
        return Columns([Text(f"held out, epoch {row['epoch']}:", style="bold"), *values], padding=(0, 2))


def _fitting(fields: Sequence[str], between: str, room: int) -> list[str]:
    """As many of the fields as have room, and how many more there are."""
    for kept in range(len(fields), -1, -1):
        shown = [*fields[:kept], *([f"and {len(fields) - kept} more"] if kept < len(fields) else [])]
        if len(between.join(shown)) <= room:
            return shown
    return []


def _held_out(key: str) -> bool:
    """Is this a mean over the held-out prompts (and not their spread)?"""
    return key.startswith("eval/") and not key.endswith("/std")


def finite(value: Any) -> bool:
    """Whether a metric is a finite number."""
    return isinstance(value, int | float) and abs(value) < math.inf and abs(value) < 2**1023


def number(value: Any) -> str:
    """A metric in about five characters, "-" for what is missing."""
    if not finite(value):
        return "-"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def count(value: Any) -> str:
    """A number of images in at most six characters: 960, 9.2k, 1.25M."""
    if not finite(value):
        return "-"
    if value < 1000:
        return str(int(value))
    return f"{value / 1e3:.1f}k" if value < 999_950 else f"{value / 1e6:.2f}M"


def duration(seconds: float | None) -> str:
    """Seconds as 0:42, 12:05 or 3:07:00."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def wall(metrics: Metrics) -> float:
    """Seconds of a line: an epoch with its evaluation, and with what was saved before it."""
    whole = metrics.get("seconds/wall") or (metrics.get("seconds") or 0.0) + (metrics.get("seconds/evaluate") or 0.0)
    return float(whole)


def split(metrics: Metrics) -> str:
    """Where an epoch's seconds went: "rollout 5.1, reward 1.2, optimise 3.5, other 0.4"."""
    parts = {name: metrics[f"seconds/{name}"] for name in PARTS if finite(metrics.get(f"seconds/{name}"))}
    parts["other"] = max(metrics["seconds"] - sum(parts.values()), 0.0)
    return ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if value >= 0.05)


def shorten(name: str, width: int) -> str:
    """`name` in at most `width` characters; the end goes, since rewards of one family differ there least often."""
    return name if len(name) <= width else f"{name[: width - 1]}…"
