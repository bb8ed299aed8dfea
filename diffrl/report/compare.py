"""Several runs on one page: curves over images and over time, first and last values, images of the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diffrl.config.schema import method_of
from diffrl.errors import UserError, foreign
from diffrl.records.disk import write_text
from diffrl.records.progress import count, duration, number
from diffrl.report.built_page import Page
from diffrl.report.data import BREADTH, PALETTE, RunData, warnings_of
from diffrl.report.grouped import grouped
from diffrl.report.groups import Group, apart, drawn_apart, find_runs, group, names_of
from diffrl.report.page import Markup
from diffrl.report.parts import compared
from diffrl.report.plots import Line
from diffrl.report.sections import signed
from diffrl.report.side_by_side import chart, images
from diffrl.report.tables import as_file, as_text


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one self-contained page that compares the runs, and return its path.

    Curves share an axis against images generated and against seconds of training (evaluation not counted). They are of
    groups, with intervals and tests (`diffrl.report.groups`), where runs differ by their seed only; else of each run.
    `run_dirs`: folders of runs, or folders that have some, such as a sweep's.

    Raises:
        UserError: fewer than two runs, one of them given twice, or a folder without one; it is named.
    """
    groups = _read(run_dirs)
    seeded = any(len(one.runs) > 1 for one in groups)
    with foreign(", ".join(map(str, run_dirs))):
        page = grouped(groups) if seeded else _overlaid([one.first for one in groups])
    return page.write(Path(out))


def write_table(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the groups' values and differences as Markdown, or as LaTeX where the file is called so (.tex).

    Raises:
        UserError: as `write_comparison`.
    """
    groups = _evaluated(run_dirs)
    with foreign(", ".join(map(str, run_dirs))):
        text = as_file(groups, Path(out).suffix)
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    return target


def text_of(run_dirs: Sequence[str | Path]) -> str:
    """For the terminal: the last value of each group and its change since before training.

    Raises:
        UserError: as `write_table`.
    """
    groups = _evaluated(run_dirs)
    with foreign(", ".join(map(str, run_dirs))):
        return "\n".join([as_text(groups), *drawn_apart([one.first for one in groups])])


def _evaluated(run_dirs: Sequence[str | Path]) -> list[Group]:
    groups = _read(run_dirs)
    if not names_of(groups):
        raise UserError(f"{groups[0].first.folder}: nothing of it was evaluated; a table needs evaluations")
    return groups


def _read(run_dirs: Sequence[str | Path]) -> list[Group]:
    folders = find_runs([Path(folder) for folder in run_dirs])
    if len(folders) < 2:
        raise UserError(f"compare needs at least two run folders, got {len(folders)}")
    return group(folders)


def _overlaid(runs: Sequence[RunData]) -> Page:
    for run, name in zip(runs, apart([run.folder.resolve() for run in runs]), strict=True):
        run.name = name
    page = Page(f"{len(runs)} runs compared")
    rows: list[list[object]] = []
    for i, run in enumerate(runs):
        line = Markup('<span class="legend"><span><i style="border-color: var(--{})"></i>{}</span></span>')
        facts = [method_of(run.config), ", ".join(run.trained), run.last["epoch"], count(run.last.get("samples"))]
        rows.append([line.format(f"c{i % PALETTE}", run.name), *facts, duration(run.elapsed())])
    page.table(rows, ("run", "method", "trained on", "epochs", "images", "time")).add("<br>")
    for run in runs:
        for warning in warnings_of(run):
            page.lead(Markup("<b>{}</b>: {}").format(run.name, warning), "warning")
    for text in drawn_apart(runs):
        page.lead(text, "warning")
    _values(page, runs)
    page.insert(compared(runs))
    _curves(page.section("Against images generated", "Means over the held-out prompts."), runs, "samples")
    _curves(page.section("Against training time", "The same values; evaluation is not counted."), runs, "elapsed")
    return page.insert(images(runs))


def _names(runs: Sequence[RunData]) -> list[str]:
    """Every evaluated value of any run: what some run trained on first, diversity last."""
    names = list(dict.fromkeys(name for run in runs for name in [*run.trained, *run.watched]))
    names = [name for name in names if any(run.series(f"eval/{name}")[0] for run in runs)]
    return sorted(names, key=lambda name: BREADTH.index(name) + 1 if name in BREADTH else 0)


def _values(page: Page, runs: Sequence[RunData]) -> None:
    rows = []
    for name in _names(runs):
        cells: list[str] = [name]
        for run in runs:
            first, last = map(number, run.ends(f"eval/{name}") or (None, None))
            text = Markup("<span>{} → {}</span> {}").format(first, last, signed(run.change(name)))
            cells.append(text if run.change(name) else "–")
        rows.append(cells)
    lower = sorted({name for run in runs for name in run.lower})
    note = "First → last evaluation on held-out prompts, and the change ± its standard error, paired over prompts. "
    note += "A change whose 95 % interval has 0 in it is noise, and has no colour."
    note += f" Lower is better for {', '.join(lower)}." if lower else ""
    page.section("Values", note).table(rows, ["", *(run.name for run in runs)])


def _curves(page: Page, runs: Sequence[RunData], x: str) -> None:
    """One chart for each value, one curve for each run."""
    label = "training time" if x == "elapsed" else "images generated"
    for name in _names(runs):
        series = [run.series(f"eval/{name}", x) for run in runs]
        lines = [
            Line(*one, f"c{i % PALETTE}", run.name, "dots")
            for i, (run, one) in enumerate(zip(runs, series, strict=True))
            if one[0]
        ]
        chart(page, name, lines, runs, label, f"{name} of every run against {label}")
