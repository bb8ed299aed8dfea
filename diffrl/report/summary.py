"""What a run's end says on the terminal: held-out values before and after, their errors, and a verdict in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from diffrl.additions.verdict import BREADTH, change, places
from diffrl.records.held_out import HeldOut
from diffrl.records.progress import Metrics, finite, number

_STYLES = {1: "green", 0: "dim", -1: "red"}
_WORDS = {1: "better", 0: "not more than noise", -1: "worse"}


def summary(
    first: Metrics,
    last: Metrics,
    trained: Sequence[str] = (),
    lower: Collection[str] = (),
    held: HeldOut | None = None,
) -> RenderableType:
    """What improved by how much: every `eval/<name>` of two epochs, before, after and the change, for the console.

    Args:
        first, last: the first and the last epoch with an evaluation.
        trained: names of the trained rewards; the others are only watched.
        lower: names of which lower is better.
        held: what each prompt scored; gives means and changes their standard errors.
    """
    held = held or HeldOut()
    names = sorted(_shared(first, last), key=lambda name: (name not in trained, name == "diversity"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("held-out prompts", overflow="fold", min_width=10)
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")  # a narrow terminal breaks before an error
    table.add_column("")
    epochs = first["epoch"], last["epoch"]
    for name in names:
        before, after = first[f"eval/{name}"], last[f"eval/{name}"]
        moved = change(name, first, last, held, lower)
        shown = Text(f"{moved.text}{_plus_minus(moved.error)}", style=_STYLES[moved.sign])
        kind = ["trained"] * (name in trained) + ["lower is better"] * (name in lower)
        means = [
            f"{number(value)}{_plus_minus(held.error(name, epoch))}"
            for value, epoch in zip((before, after), epochs, strict=True)
        ]
        table.add_row(name, *means, shown, Text(", ".join(kind), style="dim"))
    parts: list[RenderableType] = []
    if finite(last.get("samples")):
        known = any(held.error(name, epochs[1]) is not None for name in names)
        errors = " (± standard error over held-out prompts)" if known else ""
        parts.append(Text(f"After {last['epoch']} epochs and {last['samples']:,} images{errors}:"))
    parts.append(table)
    if text := verdict(first, last, trained, lower, held):
        parts.append(Text(f"\n{text}"))
    return _Encodable(Group(*parts))


def verdict(
    first: Metrics, last: Metrics, trained: Sequence[str], lower: Collection[str] = (), held: HeldOut | None = None
) -> str:
    """One sentence: what was learned, what became worse, and whether the images of one prompt still differ."""
    held = held or HeldOut()
    changes = {name: change(name, first, last, held, lower) for name in _shared(first, last)}
    clauses = []
    for name in trained:
        if one := changes.get(name):
            word = "" if one.error is None else f" ({_WORDS[one.sign]})"
            clauses.append(f"{name} {one.text}{_plus_minus(one.error)}{word}")
    judged = [name for name in changes if name not in trained and name.rpartition("/")[2] not in BREADTH]
    judged = [name for name in judged if changes[name].error is not None and not name.endswith("unreadable")]
    worse = [f"{name} {changes[name].text}" for name in judged if changes[name].sign < 0]
    if judged:
        clauses.append(f"worse: {', '.join(worse)}" if worse else "no watched value became worse by more than noise")
    return "; ".join([*clauses, *_breadth(first, last)]) + "." if clauses else ""


def _shared(first: Metrics, last: Metrics) -> list[str]:
    """The held-out values that both have; without deviations."""
    keys = [key for key in last if key.startswith("eval/") and not key.endswith("/std")]
    return [key.removeprefix("eval/") for key in keys if finite(last[key]) and finite(first.get(key))]


def _breadth(first: Metrics, last: Metrics) -> list[str]:
    """How much of the first evaluation's variety is left; of diversity where there is no variety."""
    for name in ("variety", "diversity"):
        if name in _shared(first, last) and first[f"eval/{name}"] > 0:
            before, after = first[f"eval/{name}"], last[f"eval/{name}"]
            return [f"{name} {after / before:.0%} of the untrained model's ({before:.2f} to {after:.2f})"]
    return []


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.{places(error)}f}"


class _Encodable:
    """What it wraps, with +- for ± where the output's encoding has none."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        try:
            "±─".encode(console.encoding)
        except (UnicodeEncodeError, LookupError):
            for segment in console.render(self.inner, options):
                yield segment._replace(text=segment.text.replace("±", "+-").encode("ascii", "replace").decode())
            return
        yield self.inner
