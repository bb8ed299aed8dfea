"""What a run's end says on the terminal: held-out values before and after, their errors, and a verdict in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from diffrl.records.guard import BREADTH, gain
from diffrl.records.held_out import HeldOut
from diffrl.records.progress import Metrics, finite, number

_STYLES = {1: "green", 0: "", -1: "red"}


def summary(
    first: Metrics,
    last: Metrics,
    report: str | Path | None = None,
    trained: Sequence[str] = (),
    lower: Collection[str] = (),
    held: HeldOut | None = None,
) -> RenderableType:
    """What improved by how much: every `eval/<name>` of two epochs, before, after and the change, for the console.

    Args:
        first, last: the first and the last epoch with an evaluation. Where they have none, `reward/<name>` is shown.
        report: path of `report.html`, named at the end.
        trained: names of the trained rewards; the others are only watched.
        lower: names of which lower is better.
        held: what each prompt scored; gives means and changes their standard errors.
    """
    evaluated = any(key.startswith("eval/") for key in last)
    prefix, held = "eval/" if evaluated else "reward/", held or HeldOut()
    changes = _changes(first, last, prefix)
    names = sorted(changes, key=lambda name: (name not in trained, name == "diversity"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("held-out prompts" if evaluated else "training prompts", overflow="fold")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    epochs = first["epoch"], last["epoch"]
    for name in names:
        before, after = first[prefix + name], last[prefix + name]
        difference, error = changes[name], held.change_error(name, *epochs)
        sure = held.sure(name, difference, *epochs, size=before)
        style = _STYLES[_sign(gain(name, difference, lower))] if sure else "dim"
        change = Text(f"{difference:+.3f}{_plus_minus(error)}", style=style)
        kind = ["trained"] * (name in trained) + ["lower is better"] * (name in lower)
        means = [
            f"{number(value)}{_plus_minus(held.error(name, epoch))}"
            for value, epoch in zip((before, after), epochs, strict=True)
        ]
        table.add_row(name, *means, change, Text(", ".join(kind), style="dim"))
    parts: list[RenderableType] = []
    if finite(last.get("samples")):
        known = any(held.error(name, epochs[1]) is not None for name in names)
        errors = " (± standard error over held-out prompts)" if known else ""
        parts.append(Text(f"After {last['epoch']} epochs and {last['samples']:,} images{errors}:"))
    parts.append(table)
    if evaluated and (text := verdict(first, last, trained, lower, held)):
        parts.append(Text(f"\n{text}"))
    if report is not None:
        parts.append(Text.assemble("Open ", (str(report), "bold"), overflow="fold"))
    return _Encodable(Group(*parts))


def verdict(
    first: Metrics, last: Metrics, trained: Sequence[str], lower: Collection[str] = (), held: HeldOut | None = None
) -> str:
    """One sentence: what was learned, what became worse, and whether the images of one prompt still differ."""
    held, epochs = held or HeldOut(), (first["epoch"], last["epoch"])
    changes = _changes(first, last, "eval/")
    sure = {name: held.sure(name, change, *epochs, size=first[f"eval/{name}"]) for name, change in changes.items()}
    gains = {name: gain(name, change, lower) for name, change in changes.items()}
    clauses = []
    for name in trained:
        if name in changes:
            word = "not more than noise" if not sure[name] else "better" if gains[name] > 0 else "worse"
            clauses.append(f"{name} {changes[name]:+.3f}{_plus_minus(held.change_error(name, *epochs))} ({word})")
    judged = [name for name in changes if name not in trained and name.rpartition("/")[2] not in BREADTH]
    judged = [name for name in judged if not name.startswith("divgen/") and not name.endswith("unreadable")]
    worse = [f"{name} {changes[name]:+.3f}" for name in judged if sure[name] and gains[name] < 0]
    if judged:
        clauses.append(f"worse: {', '.join(worse)}" if worse else "no watched value became worse by more than noise")
    return "; ".join([*clauses, *_breadth(first, last)]) + "." if clauses else ""


def _changes(first: Metrics, last: Metrics, prefix: str) -> dict[str, float]:
    """Of each value whose key begins so, by the rest of it; deviations and what is unknown are left out."""
    return {
        key.removeprefix(prefix): last[key] - first[key]
        for key in last
        if key.startswith(prefix) and not key.endswith("/std") and finite(last[key]) and finite(first.get(key))
    }


def _breadth(first: Metrics, last: Metrics) -> list[str]:
    """How much of the first evaluation's variety is left; of diversity where there is no variety."""
    shares = {
        name: last[f"eval/{name}"] / first[f"eval/{name}"]
        for name in ("variety", "diversity")
        if finite(last.get(f"eval/{name}")) and finite(first.get(f"eval/{name}")) and first[f"eval/{name}"] > 0
    }
    clauses = []
    for name in list(shares)[:1]:
        before, after = first[f"eval/{name}"], last[f"eval/{name}"]
        clauses.append(f"{name} {shares[name]:.0%} of the untrained model's ({before:.2f} to {after:.2f})")
    if len(shares) == 2 and shares["diversity"] < shares["variety"] - 0.05:
        clauses.append("diversity fell further mostly because mistakes went, which also differ")
    return clauses


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.3f}"


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


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
