"""Several runs on one page: curves over images and over time, first and last values, images of the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diffrl.config.schema import method_of
from diffrl.errors import UserError, foreign
from diffrl.records.disk import write_text
from diffrl.records.progress import count, duration, number
from diffrl.report.data import BREADTH, PALETTE, UNITS, RunData, Sample, read_run, warnings_of
from diffrl.report.page import escape, figure, grid, page, section, strip, table
from diffrl.report.parts import compared
from diffrl.report.plots import Axis, Line, chart
from diffrl.report.sections import change

_PROMPTS = 16  # rows of images at most


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one self-contained page that overlays the runs, and return its path.

    Curves share an axis against images generated and against seconds of training (evaluation not counted).

    Raises:
        UserError: fewer than two folders, one of them given twice, or one that is not a run's; it is named.
    """
    folders = [Path(folder).resolve() for folder in run_dirs]
    if len(folders) < 2:
        raise UserError(f"compare needs at least two run folders, got {len(folders)}")
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise UserError(f"{run_dirs[i]}: this run is given twice")
    runs = [read_run(folder) for folder in run_dirs]
    _name_apart(runs)
    with foreign(", ".join(map(str, run_dirs))):
        body = _head(runs) + _values(runs) + compared(runs)
        body += _curves(runs, "samples", "images generated", "Means over the held-out prompts.")
        body += _curves(runs, "elapsed", "training time", "The same values; evaluation is not counted.")
        body += _images(runs)
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page(f"{len(runs)} runs compared · diffrl", body))
    return target


def _name_apart(runs: Sequence[RunData]) -> None:
    """Runs whose folders have one name are called by more of their paths."""
    parts = [run.folder.resolve().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(runs):
        depth += 1
    for run, part in zip(runs, parts, strict=True):
        run.name = "/".join(part[-depth:])


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
            numbers = f"<span>{number(ends[0])} → {number(ends[1])}</span> {change(run, name, *ends)}" if ends else "–"
            cells.append(numbers)
        rows.append(cells)
    lower = sorted({name for run in runs for name in run.lower})
    note = "First → last evaluation on held-out prompts, and the change ± its standard error, paired over prompts. "
    note += "A change within two of them is noise, and has no colour."
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


def _images(runs: Sequence[RunData]) -> str:
    """For every prompt and seed that two runs share: the first run's first image, then every run's last."""
    ends = [_first_and_last(run) for run in runs]
    shared = [key for key in dict.fromkeys(key for end in ends for key in end) if sum(key in end for end in ends) > 1]
    rows = []
    for key in shared[:_PROMPTS]:
        first = next(end[key][0] for end in ends if key in end)
        images = [(first.path, "untrained" if first.epoch == 0 else f"epoch {first.epoch}")]
        for run, end in zip(runs, ends, strict=True):
            if key in end:
                images.append((end[key][1].path, f"{run.name}, epoch {end[key][1].epoch}"))
        rows.append(strip(key[0], images, key[1]))
    return section(
        "Samples", grid(rows, "strips"), "The same prompt and seed: at the start, and the last image of every run."
    )


def _first_and_last(run: RunData) -> dict[tuple[str, str], tuple[Sample, Sample]]:
    samples: dict[tuple[str, str], tuple[Sample, Sample]] = {}
    for sample in run.samples:  # oldest first
        key = (sample.prompt, sample.seed)
        samples[key] = (samples[key][0] if key in samples else sample, sample)
    return samples
