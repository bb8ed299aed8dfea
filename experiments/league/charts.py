"""Charts of many numbered entries: curves and points whose labels keep clear of each other, in diffrl's style."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from diffrl.report import plots
from diffrl.report.plots import Axis, Line, color

TALL = (3.5, 3.0)
WIDE = 1.4  # times as large, where many curves share the axes; more is too small to read on a phone


@dataclass(frozen=True)
class Curve:
    """A line with its entry's number at its end, by which the page finds it; `halves` of its intervals are a band, that
    the page shows when it points at the curve. `ring`: the place of a value with a ring."""

    line: Line
    entry: int
    halves: Sequence[float | None] = ()
    ring: int | None = None


@dataclass(frozen=True)
class Point:
    """A place of a scatter with half its 95 % intervals (None: not known)."""

    x: float
    y: float
    dx: float | None
    dy: float | None
    color: str
    entry: int


def curves(lines: Sequence[Curve], axis: Axis, wide: bool) -> str:
    """As an `<svg>` element."""

    def paint(axes: Axes) -> None:
        look: dict[str, Any]
        for one in lines:
            line, gid = one.line, f"entry-{one.entry}"
            plots.plot(axes, line, gid=gid)
            if one.ring is not None:
                look = {"mec": color(line.color), "mfc": "none"}
                axes.plot(line.xs[one.ring], line.ys[one.ring], "o", markersize=8.5, zorder=4, gid=gid, **look)
        axes.margins(x=0.1)
        limits = axes.get_xlim(), axes.get_ylim()
        for one in lines:
            halves = [half or 0.0 for half in one.halves]
            low, high = ([y + turn * half for y, half in zip(one.line.ys, halves, strict=True)] for turn in (-1, 1))
            look = {"color": color(one.line.color), "alpha": 0.22, "linewidth": 0}
            axes.fill_between(one.line.xs, low, high, zorder=1, gid=f"band-{one.entry}", **look)
        axes.set(xlim=limits[0], ylim=limits[1])  # bands do not widen the axes

    ends = [(str(one.entry), one.line.xs[-1], one.line.ys[-1], one.line.color, f"entry-{one.entry}") for one in lines]
    size = _size(TALL if axis.score else plots.SIZE, wide)
    return _marked(plots.draw(paint, axis, size, finish=lambda axes: _write_beside(axes, ends)))


def scatter(
    points: Sequence[Point], front: Sequence[tuple[float, float]], base: tuple[float, float], axis: Axis, wide: bool
) -> str:
    """Points with their intervals and numbers, the corners of their Pareto front joined, and where training began."""

    def paint(axes: Axes) -> None:
        if len(front) > 1:
            look: Any = {"color": color("muted"), "linewidth": 1, "linestyle": (0, (4, 3))}
            axes.plot(*zip(*front, strict=True), zorder=2, gid="front", **look)
        axes.plot(*base, "x", color=color("ink"), markersize=6, mew=1.6, zorder=4)
        for one in points:
            gid = f"entry-{one.entry}"
            for spread, bar in ((one.dx, axes.hlines), (one.dy, axes.vlines)):
                across, along = (one.y, one.x) if bar == axes.hlines else (one.x, one.y)
                if spread:
                    look = {"color": color(one.color), "linewidth": 1.1, "alpha": 0.45}
                    bar(across, along - spread, along + spread, gid=gid, **look)
            axes.plot(one.x, one.y, "o", color=color(one.color), markersize=5, zorder=3, gid=gid)
        axes.margins(0.09, 0.08)

    texts: list[tuple[str, float, float, str, str | None]] = [("base", *base, "ink", None)]
    texts += [(str(one.entry), one.x, one.y, one.color, f"entry-{one.entry}") for one in points]
    return _marked(plots.draw(paint, axis, _size(TALL, wide), "both", lambda axes: _write_beside(axes, texts)))


def _size(size: tuple[float, float], wide: bool) -> tuple[float, float]:
    return (size[0] * WIDE, size[1] * WIDE) if wide else size


def _marked(svg: str) -> str:
    """With the entries' numbers as attributes, which several charts of one page may share."""
    return re.sub(r'\bid="\w+-(entry|band)-(\d+)"', r'class="\1" data-entry="\2"', svg)


def _write_beside(axes: Axes, texts: Sequence[tuple[str, float, float, str, str | None]]) -> None:
    """Text beside places (text, x, y, colour, id), where little else is."""
    places = axes.transData.transform([(x, y) for _, x, y, *_ in texts]) * 72 / axes.figure.dpi
    sizes = [(4.9 * len(text), 7.5) for text, *_ in texts]
    box = axes.figure.bbox
    room = box.width * 72 / axes.figure.dpi, box.height * 72 / axes.figure.dpi
    for (text, x, y, shade, gid), offset in zip(texts, clear_of(places.tolist(), sizes, room), strict=True):
        kind: Any = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8, "fontweight": "bold"}
        axes.annotate(text, (x, y), offset, color=color(shade), zorder=5, gid=gid, **kind)


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
