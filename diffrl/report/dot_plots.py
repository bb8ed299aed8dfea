"""Charts of values by name, as inline SVG: dots in rows, and a radar; those of a run's report are in `plots.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diffrl.report.plots import SIZE, as_svg, color, styled, tick_text


@dataclass(frozen=True)
class Dots:
    """One series of a dot plot, a value (or None) for each row; `spans`: an interval (low, high) or None for each."""

    values: Sequence[float | None]
    color: str
    spans: Sequence[tuple[float, float] | None] = ()


def dots(rows: Sequence[str], series: Sequence[Dots], label: str, description: str) -> str:
    """Values side by side, one line for each row, from the top; intervals as bars. As tall as its rows need."""
    height = 0.42 + 0.19 * len(rows) + 0.06 * max(len(series) - 1, 0) * any(one.spans for one in series)
    with styled("both"):
        figure = Figure(figsize=(SIZE[0], height))
        axes = figure.add_subplot()
        left = min(0.06 + 0.0165 * max(len(_shortened(row)) for row in rows), 0.45)
        figure.subplots_adjust(left=left, right=0.97, bottom=0.38 / height, top=1 - 0.03 / height)
        for one in series:
            places = [(x, y) for y, x in enumerate(one.values) if x is not None]
            shade = color(one.color)
            for y, span in enumerate(one.spans):
                if span is not None:
                    axes.plot(span, (y, y), color=shade, linewidth=2.2, alpha=0.45)
            axes.plot([x for x, _ in places], [y for _, y in places], "o", color=shade, markersize=4.6, alpha=0.9)
        axes.set_yticks(range(len(rows)), [_shortened(row) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.tick_params(axis="y", labelcolor=color("ink"))
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, False)))
        axes.set_xlabel(label)
        return as_svg(figure, description)


def _shortened(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:11]}…{text[-12:]}"  # names of models differ at their ends, too


def radar(axes_names: Sequence[str], series: Sequence[Dots], description: str) -> str:
    """Values around a circle, one axis for each name, all from 0 outwards; values of None close the gap at 0."""
    turn = [2 * math.pi * i / len(axes_names) for i in range(len(axes_names))]
    with styled("both"):
        figure = Figure(figsize=(SIZE[0], 3.0))
        axes: Any = figure.add_subplot(projection="polar")
        figure.subplots_adjust(left=0.2, right=0.8, bottom=0.12, top=0.88)
        axes.set_theta_offset(math.pi / 2)
        axes.set_theta_direction(-1)
        for one in series:
            values = [value or 0.0 for value in one.values]
            shade = color(one.color)
            axes.plot([*turn, turn[0]], [*values, values[0]], color=shade, linewidth=1.6)
            axes.fill(turn, values, color=shade, alpha=0.07)
        axes.set_xticks(turn, axes_names)
        axes.tick_params(axis="x", labelcolor=color("ink"), pad=4)
        axes.set_ylim(0, max(1.05, *(value or 0.0 for one in series for value in one.values)))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.spines["polar"].set_color(color("grid"))
        axes.spines["polar"].set_visible(True)
        return as_svg(figure, description)
