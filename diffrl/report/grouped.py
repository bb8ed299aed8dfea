"""The page of groups of runs that differ by their seed only: values with intervals, tests, curves, images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from diffrl.report.built_page import Page
from diffrl.report.data import PALETTE, warnings_of
from diffrl.report.groups import Group, names_of
from diffrl.report.page import Markup
from diffrl.report.plots import Line
from diffrl.report.side_by_side import chart, images
from diffrl.report.tables import cells, changes, differing, marked, notes


def grouped(groups: Sequence[Group]) -> Page:
    for one in groups:
        one.first.name = one.name
    heads, rows, bold = cells(groups)
    page = Page(f"{len(groups)} groups of {sum(len(one.runs) for one in groups)} runs compared").section("Warnings")
    for text, seeds in _warnings(groups).items():
        page.lead(Markup("<b>{}</b>, seed {}: {}").format(text[0], ", ".join(map(str, seeds)), text[1]), "warning")
    page.section("Values", " ".join(notes(groups))).table(marked(rows, bold, Markup("<b>{}</b>").format), heads)
    note = "First to last evaluation, paired by seed; p: paired t-test over the prompts, from the same noise."
    heads, rows = changes(groups)
    page.section("Change since before training", note).table(rows, heads)
    if len(groups) > 1:
        heads, rows = differing(groups)
        page.section("Differences").table(rows, heads)
    note = "Thick: the mean over the seeds. Thin: each seed."
    _curves(page.section("Against images generated", note), groups, _images, "images generated")
    _curves(page.section("Against training time", "Evaluation is not counted."), groups, _elapsed, "training time")
    return page.insert(images([one.first for one in groups]))


def _images(one: Group, epoch: int) -> float:
    return fmean(one.at("samples", epoch).values())


def _elapsed(one: Group, epoch: int) -> float:
    spent = one.seconds(epoch)
    return 0.0 if spent is None else spent.mean


def _curves(page: Page, groups: Sequence[Group], place: Callable[[Group, int], float], label: str) -> None:
    """A chart for each value: each group's mean over its seeds, and its seeds."""
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
        chart(page, name, lines, [one.first for one in groups], label, f"{name} of every group")


def _warnings(groups: Sequence[Group]) -> dict[tuple[str, str], list[int]]:
    """{(group, what a reader must know of single runs): its seeds}."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in groups:
        for seed, run in one.runs.items():
            for text in warnings_of(run):
                found.setdefault((one.name, text), []).append(seed)
    return found
