"""Several runs on one page: curves over images and over time, first and last values, images of the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diffrl.config.schema import method_of
from diffrl.errors import UserError, foreign
from diffrl.records.disk import write_text
from diffrl.records.progress import count, duration, number
from diffrl.report.data import BREADTH, PALETTE, UNITS, RunData, warnings_of
from diffrl.report.grouped import grouped
from diffrl.report.groups import Group, apart, find_runs, group, names_of
from diffrl.report.page import escape, figure, grid, page, section, table
from diffrl.report.parts import compared
from diffrl.report.plots import Axis, Line, chart
from diffrl.report.sections import signed
from diffrl.report.side_by_side import images
from diffrl.report.tables import as_file


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
        body = grouped(groups) if seeded else _overlaid([one.first for one in groups])
    title = f"{len(groups)} {'groups of runs' if seeded else 'runs'} compared · diffrl"
    return _write(Path(out), page(title, body))


def write_table(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the groups' values and differences as Markdown, or as LaTeX where the file is called so (.tex).

    Raises:
        UserError: as `write_comparison`.
    """
    groups = _read(run_dirs)
    if not names_of(groups):
        raise UserError(f"{groups[0].first.folder}: nothing of it was evaluated; a table needs evaluations")
    with foreign(", ".join(map(str, run_dirs))):
        text = as_file(groups, Path(out).suffix)
    return _write(Path(out), text)


def _read(run_dirs: Sequence[str | Path]) -> list[Group]:
    folders = find_runs([Path(folder) for folder in run_dirs])
    if len(folders) < 2:
        raise UserError(f"compare needs at least two run folders, got {len(folders)}")
    return group(folders)


def _write(target: Path, text: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    return target


def _overlaid(runs: Sequence[RunData]) -> str:
    for run, name in zip(runs, apart([run.folder.resolve() for run in runs]), strict=True):
        run.name = name
    body = _head(runs) + _values(runs) + compared(runs)
    body += _curves(runs, "samples", "images generated", "Means over the held-out prompts.")
    body += _curves(runs, "elapsed", "training time", "The same values; evaluation is not counted.")
    return body + images(runs)


def _color(index: int) -> str:
    return f"c{index % PALETTE}"


def _head(runs: Sequence[RunData]) -> str:
    rows = []
    for i, run in enumerate(runs):
        line = f'<i style="border-color: var(--{_color(i)})"></i>'
        key = f'<span class="legend"><span>{line}{escape(run.name)}</span></span>'
        rewards = ", ".join(run.trained)
        cells = [method_of(run.config), rewards, run.last["epoch"], count(run.last.get("samples"))]
        rows.append([key, *map(escape, cells), duration(run.elapsed())])
    text = "".join(
        f'<p class="warning"><b>{escape(run.name)}</b>: {escape(warning)}</p>'
        for run in runs
        for warning in warnings_of(run)
    )
    head = ("run", "method", "trained on", "epochs", "images", "time")
    return f"<header><h1>{len(runs)} runs compared</h1></header>{table(rows, head, 'numbers')}<br>{text}"


def _names(runs: Sequence[RunData]) -> list[str]:
    """Every evaluated value of any run: what some run trained on first, diversity last."""
    names = list(dict.fromkeys(name for run in runs for name in [*run.trained, *run.watched]))
    names = [name for name in names if any(run.series(f"eval/{name}")[0] for run in runs)]
    return sorted(names, key=lambda name: BREADTH.index(name) + 1 if name in BREADTH else 0)


def _values(runs: Sequence[RunData]) -> str:
    rows = []
    for name in _names(runs):
        cells = [escape(name)]
        for run in runs:
            ends = run.ends(f"eval/{name}")
            numbers = f"<span>{number(ends[0])} → {number(ends[1])}</span> {signed(run.change(name))}" if ends else "–"
            cells.append(numbers)
        rows.append(cells)
    lower = sorted({name for run in runs for name in run.lower})
    note = "First → last evaluation on held-out prompts, and the change ± its standard error, paired over prompts. "
    note += "A change whose 95 % interval has 0 in it is noise, and has no colour."
    note += f" Lower is better for {', '.join(lower)}." if lower else ""
    return section("Values", table(rows, ["", *(run.name for run in runs)], "numbers") if rows else "", note)


def _curves(runs: Sequence[RunData], x: str, label: str, note: str) -> str:
    """One chart for each value, one curve for each run."""
    cards = []
    for name in _names(runs):
        lines = []
        for i, run in enumerate(runs):
            xs, ys = run.series(f"eval/{name}", x)
            if xs:
                lines.append(Line(xs, ys, _color(i), run.name, "dots"))
        unit = UNITS.get(name, "mean score")
        axis = Axis(x=label, y=unit, time=x == "elapsed", description=f"{name} of every run against {label}")
        legend = [(line.color, line.kind, line.label) for line in lines]
        tag = "lower is better" if any(name in run.lower for run in runs) else ""
        cards.append(figure(name, chart(lines, axis), tag, legend))
    return section(f"Against {label}", grid(cards), note)
