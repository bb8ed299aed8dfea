"""From scores to what is optimised: each reward's column clipped, bounded, modulated or trusted.

Symbols: N images of an epoch over all processes, K rewards, G group ids. Columns are (N,) float, NaN = not applicable.
`bound` remembers its reference between epochs: it is in the composition's `state_dict`. No step makes a number of a
NaN or a NaN of a number. What is measured and reported stays the plain score: only advantages see the composed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.advantages import group_mean, win_rates
from diffrl.rewards.order import STEPS, Steps, in_order


def clip(column: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Scores held to [low, high]: nothing is gained beyond."""
    return column.clamp(low, high)


def modulate(column: Tensor, by: Tensor, base: float = 0.4) -> Tensor:
    """Base and bonus: `s (base + (1 - base) by)`, for rewards in [0, 1] that must not be traded (FIRM's QMA and CME,
    arXiv 2603.12247). Where `by` has no score the score stays what it is.
    """
    return column * torch.where(by.isnan(), 1.0, base + (1 - base) * by)


def bound(column: Tensor, at: float, scale: float = 1.0) -> Tensor:
    """sigmoid((s - at) / scale) in (0, 1): little is gained far above the reference `at` (PAR, arXiv 2502.18770)."""
    return ((column - at) / scale).sigmoid()


def confidence(column: Tensor, by: Tensor, groups: Tensor) -> Tensor:
    """`m + (s - m) exp(-u / std u)` with the group's mean m: scores count less where another judge disagrees.

    `u = |w(s) - w(by)|` by the win rates inside the group, so that only the judges' orders count; std over all images.
    Ctrl-U (arXiv:2410.11236) weighs a reward's loss by `exp(-u)`, with u the reward model's own disagreement on two
    predictions; two judges, and scores without gradients, are this package's form of it. Where `by` has no score, or
    where all images have one u, the score stays what it is.
    """
    gap = (_win_rates(column, groups) - _win_rates(by, groups)).abs().double()
    known = gap[~gap.isnan()]
    scale = known.std(correction=0) if len(known) else known.sum()
    if float(scale) == 0.0:
        return column
    mean = group_mean(column[:, None].double(), groups)[:, 0]
    trusted = mean + (column - mean) * (-gap / scale).exp()
    return torch.where(gap.isnan(), column, trusted.to(column.dtype))


def _win_rates(column: Tensor, groups: Tensor) -> Tensor:
    """Share of the other images of its group that an image beats, ties count half; 0.5 without a rival."""
    rates = column.clone()
    for group in groups.unique():
        rows = groups == group
        rates[rows] = win_rates(column[rows, None])[:, 0].to(rates.dtype)
    return rates


class ScoreTransform:
    """Applies the steps of all rewards, in the order `STEPS`; a reward reads the others after their own steps.

    `names`: of the K columns. `steps`: {reward: {step: arguments}}; rewards that have none may be left out. The first
    `returned` columns (None: all) are returned: the others are there to be read.
    """

    def __init__(self, names: Sequence[str], steps: Mapping[str, Steps], returned: int | None = None) -> None:
        self.names = list(names)
        self.steps = {name: steps.get(name, {}) for name in self.names}
        self.order = [name for name in in_order(self.steps) if self.steps[name]]
        self.returned = len(self.names) if returned is None else returned
        self.references: dict[str, float] = {}  # of `bound`: the mean score of the first epoch, that is of the base

    def __call__(self, scores: Tensor, groups: Tensor) -> Tensor:
        """(N, returned) of the scores (N, K) of all images of an epoch and their group ids (N,) int64."""
        columns = dict(zip(self.names, scores.unbind(dim=1), strict=True))
        for name in self.order:
            columns[name] = self._compose(name, columns, groups)
        return torch.stack([columns[name] for name in self.names[: self.returned]], dim=1)

    def _compose(self, name: str, columns: Mapping[str, Tensor], groups: Tensor) -> Tensor:
        column = columns[name]
        for step in STEPS:
            if step not in self.steps[name]:
                continue
            arguments = dict(self.steps[name][step])
            if step == "clip":
                column = clip(column, **arguments)
            elif step == "bound":
                column = bound(column, self._reference(name, column, **arguments), arguments.get("scale", 1.0))
            elif step == "modulate":
                column = modulate(column, columns[arguments.pop("by")], **arguments)
            else:
                column = confidence(column, columns[arguments["by"]], groups)
        return column

    def _reference(self, name: str, column: Tensor, at: float | None = None, scale: float = 1.0) -> float:
        """`at`, or the mean of the first epoch that has a score: the run starts from the base model."""
        if at is not None:
            return at
        known = column[~column.isnan()]
        if name not in self.references and len(known):
            self.references[name] = float(known.double().mean())
        return self.references.get(name, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"references": dict(self.references)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.references = dict(state["references"])
