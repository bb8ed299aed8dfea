"""The page of groups of runs that differ by their seed only: values with intervals, tests, curves, images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from diffrl.report.data import PALETTE, UNITS, warnings_of
from diffrl.report.groups import Group, names_of
from diffrl.report.page import escape, figure, grid, section, table
from diffrl.report.plots import Axis, Line, chart
from diffrl.report.side_by_side import images
from diffrl.report.tables import cells, changes, differing, notes


def grouped(groups: Sequence[Group]) -> str:
    """The page's body."""
    for one in groups:
        one.first.name = one.name
    heads, rows, bold = cells(groups)
    marked = [
        [f"<b>{escape(c)}</b>" if b else escape(c) for c, b in zip(*both, strict=True)]
        for both in zip(rows, bold, strict=True)
    ]
    many = sum(len(one.runs) for one in groups)
    body = f"<header><h1>{len(groups)} groups of {many} runs compared</h1></header>{_warnings(groups)}"
    body += section("Values", table(marked, heads, "numbers"), " ".join(notes(groups)))
    note = "First to last evaluation, paired by seed; p: paired t-test over the prompts, from the same noise."
    body += section("Change since before training", _plain(*changes(groups)), note)
    if len(groups) > 1:
        body += section("Differences", _plain(*differing(groups)))
    note = "Thick: the mean over the seeds. Thin: each seed."
    body += section("Against images generated", _curves(groups, _images, "images generated"), note)
    body += section("Against training time", _curves(groups, _elapsed, "training time"), "Evaluation is not counted.")
    return body + images([one.first for one in groups])


def _plain(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table([[*map(escape, row)] for row in rows], heads, "numbers")


def _images(one: Group, epoch: int) -> float:
    return fmean(one.at("samples", epoch).values())


def _elapsed(one: Group, epoch: int) -> float:
    spent = one.seconds(epoch)
    return 0.0 if spent is None else spent.mean


def _curves(groups: Sequence[Group], place: Callable[[Group, int], float], label: str) -> str:
    """A chart for each value: each group's mean over its seeds, and its seeds."""
    cards = []
    for name in names_of(groups):
        lines = []
        for i, one in enumerate(groups):
            color, xs = f"c{i % PALETTE}", [place(one, epoch) for epoch in one.epochs]
            columns = [one.at(f"eval/{name}", epoch) for epoch in one.epochs]
            for seed in one.runs if len(one.runs) > 1 else ():
                if all(seed in column for column in columns):
                    lines.append(Line(xs, [column[seed] for column in columns], color, kind="faint"))
            if all(columns):
                lines.append(Line(xs, [fmean(column.values()) for column in columns], color, one.name, "dots"))
        axis = Axis(
            x=label, y=UNITS.get(name, "mean score"), time=place is _elapsed, description=f"{name} of every group"
        )
        legend = [(line.color, line.kind, line.label) for line in lines if line.label]
        lower = any(name in one.first.lower for one in groups)
        cards.append(figure(name, chart(lines, axis), "lower is better" if lower else "", legend))
    return grid(cards)


def _warnings(groups: Sequence[Group]) -> str:
    """What a reader must know of single runs, each sentence with its seeds."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in groups:
        for seed, run in one.runs.items():
            for text in warnings_of(run):
                found.setdefault((one.name, text), []).append(seed)
    lines = [
        f'<p class="warning"><b>{escape(name)}</b>, seed {", ".join(map(str, seeds))}: {escape(text)}</p>'
        for (name, text), seeds in found.items()
    ]
    return section("Warnings", "".join(lines))
