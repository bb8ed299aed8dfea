"""Charts as inline SVG. Matplotlib draws them in placeholder colours, which become the page's own: light or dark."""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from diffrl.records.progress import PARTS

# Names of the style sheet's colours, each with the placeholder that it replaces.
COLORS = ("ink", "muted", "grid", "warn", *PARTS, "other", *(f"c{i}" for i in range(30)))
_PLACEHOLDER = {name: f"#0f{i:02x}f0" for i, name in enumerate(COLORS)}
LEAST = 0.02  # of the largest value: what the y axis spans at least
_MOST_POINTS = 400  # longer curves are averaged in this many pieces: more cannot be seen
MOST_LETTERS = 6  # of a tick of the y axis: more of them would lie on its label
SIZE = (3.5, 2.25)  # inches of 72 units: drawn about as wide as a phone, so that text keeps its size there
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "diffrl",
    "font.size": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _PLACEHOLDER["muted"],
    "axes.labelcolor": _PLACEHOLDER["muted"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _PLACEHOLDER["grid"],
    "grid.linewidth": 0.6,
    "text.color": _PLACEHOLDER["ink"],
    "xtick.color": _PLACEHOLDER["muted"],
    "ytick.color": _PLACEHOLDER["muted"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Line:
    """One curve. `kind`: "line", "dots" (a line with a dot for each value), "faint" (thin, in the background) or
    "dashed"."""

    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    label: str = ""
    kind: str = "line"


@dataclass(frozen=True)
class Axis:
    """Labels with units; `floor`, a value that the y axis always includes; `level`, a dashed line with its label."""

    x: str = "images generated"
    y: str = ""
    log: bool = False
    floor: float | None = None
    level: tuple[float, str] | None = None
    time: bool = False  # x is in seconds
    score: bool = False  # x is a score
    description: str = field(default="", kw_only=True)  # for readers who do not see it


def draw(
    paint: Callable[[Axes], None],
    axis: Axis,
    size: tuple[float, float] = SIZE,
    grid: str = "y",
    finish: Callable[[Axes], None] = lambda axes: None,
) -> str:
    """One pair of axes as an `<svg>` element: `paint` draws into them, `finish` when labels and limits are known."""
    with styled(grid):
        figure, axes = _figure(size)
        paint(axes)
        _label(axes, axis)
        finish(axes)
        return as_svg(figure, axis.description)


def styled(grid: str) -> AbstractContextManager[None]:
    """A chart's settings: matplotlib's defaults and `STYLE`, whatever a user's matplotlibrc or program has set (LaTeX,
    a theme of seaborn's). `grid`: "x", "y" or "both"."""
    defaults, now = matplotlib.rcParamsDefault, matplotlib.rcParams
    changed = {name: defaults[name] for name in defaults if "backend" not in name and now[name] != defaults[name]}
    return matplotlib.rc_context({**changed, **STYLE, "axes.grid.axis": grid})


def color(name: str) -> str:
    """What stands for a colour of the style sheet in `draw`."""
    return _PLACEHOLDER[name]


def plot(axes: Axes, line: Line, **options: Any) -> None:
    """One curve."""
    xs, ys = _thin(line.xs, line.ys)
    width, alpha, order = (0.9, 0.55, 2) if line.kind == "faint" else (1.7, 1.0, 3)
    if line.kind == "dots" or len(xs) == 1:
        options |= {"marker": "o", "markersize": 3.6}
    options |= {"linestyle": "--" if line.kind == "dashed" else "-", "linewidth": width, "alpha": alpha}
    axes.plot(xs, ys, color=color(line.color), zorder=order, **options)


def chart(lines: Sequence[Line], axis: Axis) -> str:
    """Curves over one pair of axes, as an `<svg>` element."""

    def paint(axes: Axes) -> None:
        for line in lines:
            plot(axes, line)
        if axis.level is not None:
            value, text = axis.level
            axes.axhline(value, color=color("warn"), linewidth=1, linestyle=(0, (4, 3)))
            low, high = axes.get_ylim()
            below = value > low + 0.2 * (high - low)  # curves begin above the level; keep clear of the x axis
            axes.annotate(
                text, (0, value), xycoords=("axes fraction", "data"), xytext=(4, -3 if below else 2),
                textcoords="offset points", ha="left", va="top" if below else "bottom", color=color("warn"),
            )  # fmt: skip

    return draw(paint, axis)


def stack(xs: Sequence[float], parts: Mapping[str, Sequence[float]], axis: Axis) -> str:
    """Parts of a whole over time, as stacked areas coloured by the name of the part."""

    def paint(axes: Axes) -> None:
        thinned = [_thin(xs, values) for values in parts.values()]
        colors = [color(name) for name in parts]
        axes.stackplot(thinned[0][0], [values for _, values in thinned], colors=colors, linewidth=0)
        axes.set_axisbelow(False)
        axes.margins(x=0)

    return draw(paint, axis)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values, all positive, are better read on a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) > 50 * min(values)


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    height, times = size[1], size[0] / SIZE[0]
    figure = Figure(figsize=size)
    axes = figure.add_subplot()
    low, high = 0.45 / height, 1 - 0.09 / height
    left, right = 0.17 / times, 1 - 0.035 / times
    figure.subplots_adjust(left=left, right=right, bottom=low, top=high)  # fixed: a layout engine doubles the time
    axes.yaxis.set_label_coords(-0.131 / times / (right - left), 0.5)
    return figure, axes


def _label(axes: Axes, axis: Axis) -> None:
    axes.set_xlabel(axis.x)
    axes.set_ylabel(axis.y)
    if axis.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", length=0)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    low, high = axes.get_ylim()
    if not axis.log and high - low < (least := LEAST * max(abs(low), abs(high))):  # what hardly moves looks so
        low, high = (low + high - least) / 2, (low + high + least) / 2
        axes.set_ylim(low, high)
    if axis.floor is not None:
        axes.set_ylim(min(low, axis.floor), max(high, axis.floor))
    power = 0 if axis.log else _power(axes)
    if power:
        axes.set_ylabel(f"{axis.y} (×1e{power})".replace("-", "−").lstrip())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value / 10.0**power, axis.log)))
    if axis.time:
        seconds = axes.get_xlim()[1]
        unit, name = (3600.0, "hours") if seconds > 7200 else (60.0, "minutes") if seconds > 120 else (1.0, "seconds")
        axes.set_xlabel(f"{axis.x} ({name})")
        steps = axes.get_xlim()
        locator = MaxNLocator(5, steps=[1, 2, 5, 10])
        axes.set_xticks([tick * unit for tick in locator.tick_values(steps[0] / unit, steps[1] / unit)])
        axes.set_xlim(steps)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g}"))
    elif axis.score:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, False)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))


def _power(axes: Axes) -> int:
    """The power of ten that the y axis is in, so that its ticks differ and leave room for its label."""
    low, high = axes.get_ylim()
    largest = max(abs(low), abs(high))
    texts = [tick_text(value, False) for value in axes.get_yticks() if low <= value <= high]
    short = largest >= 0.01 and max(map(len, texts), default=0) <= MOST_LETTERS
    return 0 if short or not largest else math.floor(math.log10(largest))


def tick_text(value: float, decades: bool) -> str:
    """A tick in few characters: 0.25, −3, or 2.5e−4 on an axis that spans decades."""
    if not decades or value == 0:
        return f"{value:.4g}".replace("-", "−")
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")


def _short(value: float, _: Any = None) -> str:
    """1500 as 1.5k, 2,000,000 as 2M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    if len(xs) <= _MOST_POINTS:
        return xs, ys
    edges = [round(i * len(xs) / _MOST_POINTS) for i in range(_MOST_POINTS + 1)]
    pieces = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return [sum(xs[p]) / len(xs[p]) for p in pieces], [sum(ys[p]) / len(ys[p]) for p in pieces]


def as_svg(figure: Figure, description: str) -> str:
    """A drawn figure in the page's colours."""
    buffer = io.StringIO()
    empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.S)  # it would style the whole page
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(
        r"font-family: [^;\"]*;?|font: (?=[\d.]+px)", lambda m: "font-size: " if "font:" in m[0] else "", text
    )
    text = re.sub(r"(font-size: [\d.]+px) [^;\"]*", r"\1", text)
    for name, placeholder in _PLACEHOLDER.items():
        text = text.replace(placeholder, f"var(--{name})")
    # Identifiers of several pictures meet on one page.
    mark = hashlib.sha256((text + description).encode()).hexdigest()[:8]
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{mark}-", text).replace("xlink:href", "href")
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None, "matplotlib gives every SVG a viewBox"
    start = text.index(">") + 1
    head = f'<svg {view[0]} role="img" aria-label="{html.escape(description)}">'
    return head + re.sub(r"\n\s*", "\n", text[start:])
