"""From the values of a benchmark's prompts to the lines of its table, with standard errors, and to their differences.

A line is the mean v of all its values, of which prompt p (of P that have some) gives n_p with the sum s_p; N is the sum
of n_p. Images of one prompt are not independent, so the error is over prompts, by the linearisation of the ratio:
SE^2 = P / (P - 1) sum_p d_p^2 with d_p = (s_p - v n_p) / N. A mean of lines has the mean of their d, and a difference
between two models on the same prompts the difference: what both models find hard does not count as noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diffrl.stats import critical

from .items import Mark

Key = tuple[str, str]  # section, line


@dataclass(frozen=True)
class Line:
    """A value, or the change of one between two models, from `count` values of `prompts` prompts; deviations (all
    prompts,): d, scaled by sqrt(P / (P - 1))."""

    value: float
    count: int
    prompts: int
    deviations: np.ndarray

    @property
    def error(self) -> float | None:
        """The standard error; None from one prompt."""
        return math.sqrt(float(self.deviations @ self.deviations)) if self.prompts > 1 else None

    @property
    def span(self) -> tuple[float, float] | None:
        """The 95 % interval."""
        half = None if self.error is None else critical(self.prompts) * self.error
        return None if half is None else (self.value - half, self.value + half)

    @property
    def sure(self) -> bool:
        """Does the 95 % interval leave 0 out?"""
        return self.span is not None and not self.span[0] <= 0 <= self.span[1]


def lines_of(marks: Sequence[Iterable[Mark]], overall: Mapping[str, str]) -> dict[Key, Line]:
    """The lines of the values of every prompt, in the order in which they come first; `overall` lines at the end."""
    sums: dict[Key, np.ndarray] = {}
    counts: dict[Key, np.ndarray] = {}
    for prompt, values in enumerate(marks):
        for section, name, value in values:
            key = (section, name)
            if key not in sums:
                sums[key], counts[key] = np.zeros(len(marks)), np.zeros(len(marks))
            sums[key][prompt] += value
            counts[key][prompt] += 1
    lines = {key: _line(sums[key], counts[key]) for key in sums}
    for name, section in overall.items():
        parts = [line for key, line in lines.items() if key[0] == section]
        if parts:
            deviations = np.mean([line.deviations for line in parts], axis=0)
            value, total = float(np.mean([line.value for line in parts])), sum(line.count for line in parts)
            lines["Overall", name] = Line(value, total, min(line.prompts for line in parts), deviations)
    return lines


def _line(sums: np.ndarray, counts: np.ndarray) -> Line:
    total, prompts = counts.sum(), int((counts > 0).sum())
    value = float(sums.sum() / total)
    scale = math.sqrt(prompts / (prompts - 1)) if prompts > 1 else 0.0
    return Line(value, int(total), prompts, scale * (sums - value * counts) / total)


def change(first: Line, second: Line) -> Line:
    """Second minus first, on the same prompts."""
    gap = second.deviations - first.deviations
    return Line(second.value - first.value, second.count, first.prompts, gap)
