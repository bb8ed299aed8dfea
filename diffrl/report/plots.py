"""Charts as inline SVG. Matplotlib draws them in placeholder colours, which become the page's own: light or dark."""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from diffrl.records.progress import PARTS

# Names of the style sheet's colours, each with the placeholder that it replaces.
COLORS = ("ink", "muted", "grid", "warn", *PARTS, "other", *(f"c{i}" for i in range(8)))
_PLACEHOLDER = {name: f"#0f{i:02x}f0" for i, name in enumerate(COLORS)}
LEAST = 0.02  # of the largest value: what the y axis spans at least
_MOST_POINTS = 400  # longer curves are averaged in this many pieces: more cannot be seen
_SIZE = (3.5, 2.25)  # inches of 72 units: drawn about as wide as a phone, so that text keeps its size there
_TALL = (3.5, 3.0)
_WIDE = 1.4  # times as large, where many curves share the axes; more is too small to read on a phone
_STYLE: Any = {
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
    "dashed". `entry`: a number, written at its end, by which the page finds the curve; `halves` of its intervals are
    then a band, which the page shows when it points at the curve. `ring`: the place of a value with a ring."""

    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    label: str = ""
    kind: str = "line"
    entry: int | None = None
    halves: Sequence[float | None] = ()
    ring: int | None = None


@dataclass(frozen=True)
class Point:
    """A place of a scatter with half its 95 % intervals (None: not known); `entry` as in `Line`."""

    x: float
    y: float
    dx: float | None
    dy: float | None
    color: str
    entry: int


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
    wide: bool = False  # for many curves, and wide cards
    description: str = field(default="", kw_only=True)  # for readers who do not see it


def chart(lines: Sequence[Line], axis: Axis) -> str:
    """Curves over one pair of axes, as an `<svg>` element."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(_TALL if axis.score else _SIZE, axis.wide)
        for line in lines:
            xs, ys = _thin(line.xs, line.ys)
            style = {"dashed": "--"}.get(line.kind, "-")
            width, alpha, order = (0.9, 0.55, 2) if line.kind == "faint" else (1.7, 1.0, 3)
            marker: dict[str, Any] = {"marker": "o", "markersize": 3.6} if line.kind == "dots" or len(xs) == 1 else {}
            color, gid = _PLACEHOLDER[line.color], None if line.entry is None else f"entry-{line.entry}"
            axes.plot(
                xs, ys, color=color, linestyle=style, linewidth=width, alpha=alpha, zorder=order, gid=gid, **marker
            )
            if line.ring is not None:
                axes.plot(xs[line.ring], ys[line.ring], "o", mec=color, mfc="none", markersize=8.5, zorder=4, gid=gid)
        _number_ends(axes, [line for line in lines if line.entry is not None])
        if axis.level is not None:
            value, text = axis.level
            axes.axhline(value, color=_PLACEHOLDER["warn"], linewidth=1, linestyle=(0, (4, 3)))
            low, high = axes.get_ylim()
            below = value > low + 0.2 * (high - low)  # curves begin above the level; keep clear of the x axis
            axes.annotate(
                text, (0, value), xycoords=("axes fraction", "data"), xytext=(4, -3 if below else 2),
                textcoords="offset points", ha="left", va="top" if below else "bottom", color=_PLACEHOLDER["warn"],
            )  # fmt: skip
        _finish(axes, axis)
        return _svg(figure, axis.description)


def scatter(
    points: Sequence[Point], front: Sequence[tuple[float, float]], base: tuple[float, float], axis: Axis
) -> str:
    """Points with their intervals and numbers, the corners of their Pareto front joined, and where training began."""
    with matplotlib.rc_context(_STYLE | {"axes.grid.axis": "both"}):
        figure, axes = _figure(_TALL, axis.wide)
        if len(front) > 1:
            color = _PLACEHOLDER["muted"]
            axes.plot(*zip(*front, strict=True), color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=2, gid="front")
        axes.plot(*base, "x", color=_PLACEHOLDER["ink"], markersize=6, mew=1.6, zorder=4)
        for one in points:
            color, gid = _PLACEHOLDER[one.color], f"entry-{one.entry}"
            for spread, bar in ((one.dx, axes.hlines), (one.dy, axes.vlines)):
                across, along = (one.y, one.x) if bar == axes.hlines else (one.x, one.y)
                if spread:
                    bar(across, along - spread, along + spread, color=color, linewidth=1.1, alpha=0.45, gid=gid)
            axes.plot(one.x, one.y, "o", color=color, markersize=5, zorder=3, gid=gid)
        axes.margins(0.09, 0.08)
        _finish(axes, axis)
        texts: list[tuple[str, float, float, str, str | None]] = [("base", *base, "ink", None)]
        texts += [(str(one.entry), one.x, one.y, one.color, f"entry-{one.entry}") for one in points]
        _write_beside(axes, texts)
        return _svg(figure, axis.description)


def _number_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Each curve's number at its end, and the bands of their intervals, which do not widen the axes."""
    if not lines:
        return
    axes.margins(x=0.1)
    limits = axes.get_xlim(), axes.get_ylim()
    for line in lines:
        if line.halves:
            halves = [half or 0.0 for half in line.halves]
            low, high = ([y + turn * half for y, half in zip(line.ys, halves, strict=True)] for turn in (-1, 1))
            color, gid = _PLACEHOLDER[line.color], f"band-{line.entry}"
            axes.fill_between(line.xs, low, high, color=color, alpha=0.22, linewidth=0, zorder=1, gid=gid)
    axes.set(xlim=limits[0], ylim=limits[1])
    _write_beside(axes, [(str(one.entry), one.xs[-1], one.ys[-1], one.color, f"entry-{one.entry}") for one in lines])


def _write_beside(axes: Axes, texts: Sequence[tuple[str, float, float, str, str | None]]) -> None:
    """Text beside places (text, x, y, colour, id), where little else is."""
    places = axes.transData.transform([(x, y) for _, x, y, *_ in texts]) * 72 / axes.figure.dpi
    sizes = [(4.9 * len(text), 7.5) for text, *_ in texts]
    box = axes.figure.bbox
    room = box.width * 72 / axes.figure.dpi, box.height * 72 / axes.figure.dpi
    for (text, x, y, color, gid), offset in zip(texts, clear_of(places.tolist(), sizes, room), strict=True):
        kind: Any = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8, "fontweight": "bold"}
        axes.annotate(text, (x, y), offset, color=_PLACEHOLDER[color], zorder=5, gid=gid, **kind)


Box = tuple[float, float, float, float]  # centre, half width, half height


def clear_of(
    places: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], room: tuple[float, float]
) -> list[tuple[float, float]]:
    """Where the centre of a label (width, height) goes from its place so that it covers no other label and no place.

    Of eight directions, near and farther, the first that covers nothing and stays in the room, else what covers least.
    All in points.
    """
    boxes: list[Box] = [(x, y, 3.0, 3.0) for x, y in places]
    offsets = []
    for (x, y), (width, height) in zip(places, sizes, strict=True):
        options = [
            (reach * across * (4 + width / 2), reach * up * (4 + height / 2))
            for reach in (1.0, 1.6, 2.4)
            for across, up in ((1, 0), (0.8, 0.8), (0.8, -0.8), (0, 1), (0, -1), (-1, 0), (-0.8, 0.8), (-0.8, -0.8))
        ]
        covered = [_covered((x + dx, y + dy, width / 2, height / 2), boxes, room) for dx, dy in options]
        dx, dy = options[covered.index(min(covered))]
        offsets.append((dx, dy))
        boxes.append((x + dx, y + dy, width / 2, height / 2))
    return offsets


def _covered(box: Box, others: Sequence[Box], room: tuple[float, float]) -> float:
    """The area that a box has in common with others and with what is outside of the room."""
    x, y, w, h = box
    outside = max(0.0, w - x, x + w - room[0]) * 2 * h + max(0.0, h - y, y + h - room[1]) * 2 * w
    shared = [(w + p - abs(x - a), h + q - abs(y - b)) for a, b, p, q in others]
    return outside + sum(across * up for across, up in shared if across > 0 and up > 0)


def stack(xs: Sequence[float], parts: Mapping[str, Sequence[float]], axis: Axis) -> str:
    """Parts of a whole over time, as stacked areas coloured by the name of the part."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure()
        thinned = [_thin(xs, values) for values in parts.values()]
        colors = [_PLACEHOLDER[name] for name in parts]
        axes.stackplot(thinned[0][0], [values for _, values in thinned], colors=colors, linewidth=0)
        axes.set_axisbelow(False)
        axes.margins(x=0)
        _finish(axes, axis)
        return _svg(figure, axis.description)


@dataclass(frozen=True)
class Dots:
    """One series of a dot plot, a value (or None) for each row; `spans`: an interval (low, high) or None for each."""

    values: Sequence[float | None]
    color: str
    spans: Sequence[tuple[float, float] | None] = ()


def dots(rows: Sequence[str], series: Sequence[Dots], label: str, description: str) -> str:
    """Values side by side, one line for each row, from the top; intervals as bars. As tall as its rows need."""
    height = 0.42 + 0.19 * len(rows) + 0.06 * max(len(series) - 1, 0) * any(one.spans for one in series)
    with matplotlib.rc_context(_STYLE | {"axes.grid.axis": "both"}):
        figure = Figure(figsize=(_SIZE[0], height))
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        left = min(0.06 + 0.0165 * max(len(_shortened(row)) for row in rows), 0.45)
        figure.subplots_adjust(left=left, right=0.97, bottom=0.38 / height, top=1 - 0.03 / height)
        for one in series:
            places = [(x, y) for y, x in enumerate(one.values) if x is not None]
            color = _PLACEHOLDER[one.color]
            for y, span in enumerate(one.spans):
                if span is not None:
                    axes.plot(span, (y, y), color=color, linewidth=2.2, alpha=0.45)
            axes.plot([x for x, _ in places], [y for _, y in places], "o", color=color, markersize=4.6, alpha=0.9)
        axes.set_yticks(range(len(rows)), [_shortened(row) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.tick_params(axis="y", labelcolor=_PLACEHOLDER["ink"])
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _score(value, False)))
        axes.set_xlabel(label)
        return _svg(figure, description)


def _shortened(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"


def radar(axes_names: Sequence[str], series: Sequence[Dots], description: str) -> str:
    """Values around a circle, one axis for each name, all from 0 outwards; values of None close the gap at 0."""
    turn = [2 * math.pi * i / len(axes_names) for i in range(len(axes_names))]
    with matplotlib.rc_context(_STYLE | {"axes.grid.axis": "both"}):
        figure = Figure(figsize=(_SIZE[0], 3.0))
        FigureCanvasSVG(figure)
        axes: Any = figure.add_subplot(projection="polar")
        figure.subplots_adjust(left=0.2, right=0.8, bottom=0.12, top=0.88)
        axes.set_theta_offset(math.pi / 2)
        axes.set_theta_direction(-1)
        for one in series:
            values = [value or 0.0 for value in one.values]
            color = _PLACEHOLDER[one.color]
            axes.plot([*turn, turn[0]], [*values, values[0]], color=color, linewidth=1.6)
            axes.fill(turn, values, color=color, alpha=0.07)
        axes.set_xticks(turn, axes_names)
        axes.tick_params(axis="x", labelcolor=_PLACEHOLDER["ink"], pad=4)
        axes.set_ylim(0, max(1.05, *(value or 0.0 for one in series for value in one.values)))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.spines["polar"].set_color(_PLACEHOLDER["grid"])
        axes.spines["polar"].set_visible(True)
        return _svg(figure, description)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values, all positive, are better read on a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) > 50 * min(values)


def _figure(size: tuple[float, float] = _SIZE, wide: bool = False) -> tuple[Figure, Axes]:
    times = _WIDE if wide else 1.0
    width, height = size[0] * times, size[1] * times
    figure = Figure(figsize=(width, height))
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    low, high = 0.45 / height, 1 - 0.09 / height
    left, right = 0.17 / times, 1 - 0.035 / times
    figure.subplots_adjust(left=left, right=right, bottom=low, top=high)  # fixed: a layout engine doubles the time
    axes.yaxis.set_label_coords(-0.131 / times / (right - left), 0.5)
    return figure, axes


def _finish(axes: Axes, axis: Axis) -> None:
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
    tiny = axis.log or max(abs(low), abs(high)) < 0.01
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _score(value, tiny)))
    if axis.floor is not None:
        axes.set_ylim(min(low, axis.floor), max(high, axis.floor))
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
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _score(value, False)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))


def _score(value: float, tiny: bool) -> str:
    """A tick of the y axis in few characters: 0.25, −3, or 2.5e−4 where all values are tiny."""
    if not tiny or value == 0:
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


def _svg(figure: Figure, description: str) -> str:
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
    text = re.sub(r'\bid="(entry|band)-(\d+)"', r'class="\1" data-entry="\2"', text)
    # Identifiers of several pictures meet on one page.
    mark = hashlib.sha256((text + description).encode()).hexdigest()[:8]
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{mark}-", text).replace("xlink:href", "href")
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None, "matplotlib gives every SVG a viewBox"
    start = text.index(">") + 1
    head = f'<svg {view[0]} role="img" aria-label="{html.escape(description)}">'
    return head + re.sub(r"\n\s*", "\n", text[start:])
