"""From scores to what is optimised: each reward's column clipped, tamed, standardised, compared, combined or gated.

Symbols: N images of an epoch over all processes, K rewards, G group ids. Columns are (N,) float, NaN = not applicable.
No step keeps anything between epochs, so there is nothing to resume; no step makes a number of a NaN or a NaN of a
number. What is measured and reported stays the plain score: only advantages see the composed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from diffrl.advantages import win_rates
from diffrl.rewards.order import STEPS, Steps, in_order


def clip(column: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Scores held to [low, high]: nothing is gained beyond."""
    return column.clamp(low, high)


def log(column: Tensor, scale: float = 1.0) -> Tensor:
    """sign(s) ln(1 + |s| / scale): straight near 0, tame far out (symlog; DreamerV3, arXiv 2301.04104)."""
    return column.sign() * (column.abs() / scale).log1p()


def threshold(column: Tensor, at: float) -> Tensor:
    """1 where the score is at least `at`, else 0."""
    return (column >= at).to(column).where(~column.isnan(), column)


def standardise(column: Tensor, limit: float = math.inf) -> Tensor:
    """(s - mean) / std over all of the epoch's images that have a score, held to +-limit; 0 if they all score the same.

    Statistics of the epoch itself and not running ones: they need no state, and every process count gives the same.
    """
    known = column[~column.isnan()]
    if len(known) == 0:
        return column
    std = known.std(correction=0)
    # As `group_advantages`: a spread of float rounding is no spread.
    if std <= 1e-6 * known.abs().max():
        return column * 0.0
    return ((column - known.mean()) / std).clamp(-limit, limit)


def win_rate(column: Tensor, groups: Tensor) -> Tensor:
    """Share of the other images of its group that an image beats, ties count half (Pref-GRPO, arXiv 2508.20751).

    `groups`: (N,) int64. 0.5 for an image without a rival that has a score.
    """
    rates = column.clone()
    for group in groups.unique():
        rows = groups == group
        rates[rows] = win_rates(column[rows, None])[:, 0].to(rates.dtype)
    return rates


def ensemble(columns: Tensor, reduce: str = "mean", coefficient: float = 1.0) -> Tensor:
    """(N, M) columns of M rewards to one: over those that have a score, "mean", "min" or "lower".

    "min" is the worst case and "lower" the bound `mean - coefficient * std`, the std being that between the rewards
    (Coste et al., arXiv 2310.02743). An image without a score in the first column, the reward's own, gets none.
    """
    own, known = columns[:, 0], ~columns.isnan()
    if reduce == "min":
        combined = columns.masked_fill(~known, math.inf).amin(dim=1)
    else:
        combined = columns.nanmean(dim=1)
        if reduce == "lower":
            squares = (columns - combined[:, None]).square().nansum(dim=1)
            combined = combined - coefficient * (squares / known.sum(dim=1)).sqrt()
    return combined.where(~own.isnan(), own)


def gate(column: Tensor, by: Tensor, least: float, otherwise: float = 0.0) -> Tensor:
    """The score where `by` is at least `least`, else `otherwise`: quality counts only where the content is right.

    Where `by` has no score the gate is open.
    """
    shut = (by < least) & ~column.isnan()
    return column.masked_fill(shut, otherwise)


class Composition:
    """Applies the steps of all rewards, in the order `STEPS`; a reward reads the others after their own steps.

    `names`: of the K columns. `steps`: {reward: {step: arguments}}; rewards that have none may be left out. The first
    `kept` columns (None: all) are returned: the ones behind are there to be read.
    """

    def __init__(self, names: Sequence[str], steps: Mapping[str, Steps], kept: int | None = None) -> None:
        self.names = list(names)
        self.steps = {name: steps.get(name, {}) for name in self.names}
        self.order = [name for name in in_order(self.steps) if self.steps[name]]
        self.kept = len(self.names) if kept is None else kept

    def __call__(self, scores: Tensor, groups: Tensor) -> Tensor:
        """(N, kept) of the scores (N, K) of all images of an epoch and their group ids (N,) int64."""
        columns = dict(zip(self.names, scores.unbind(dim=1), strict=True))
        for name in self.order:
            columns[name] = self._compose(name, columns, groups)
        return torch.stack([columns[name] for name in self.names[: self.kept]], dim=1)

    def _compose(self, name: str, columns: Mapping[str, Tensor], groups: Tensor) -> Tensor:
        column = columns[name]
        for step in STEPS:
            if step not in self.steps[name]:
                continue
            arguments = dict(self.steps[name][step])
            if step == "win_rate":
                column = win_rate(column, groups)
            elif step == "ensemble":
                others = [columns[other] for other in arguments.pop("others")]
                column = ensemble(torch.stack([column, *others], dim=1), **arguments)
            elif step == "gate":
                column = gate(column, columns[arguments.pop("by")], **arguments)
            else:
                column = _POINTWISE[step](column, **arguments)
        return column


_POINTWISE: dict[str, Callable[..., Tensor]] = {
    "clip": clip,
    "log": log,
    "threshold": threshold,
    "standardise": standardise,
}
