"""The steps of a composition (`compose.py`), each of one reward's column, (N,) float, NaN = not applicable.

Symbols: N images of an epoch over all processes, G group ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from diffrl.advantages import group_mean, win_rates
from diffrl.rewards.order import STEPS, Steps


def applied(
    name: str, steps: Steps, columns: Mapping[str, Tensor], groups: Tensor, references: dict[str, float]
) -> Tensor:
    """The column `name` after its `steps`, in the order `STEPS`. `references`: of `bound`, by name; a new one is kept.

    Without `at` it is the mean of the first epoch that has a score: the run starts from the base model.
    """
    column = columns[name]
    for step in (one for one in STEPS if one in steps):
        arguments = dict(steps[step])
        if step == "clip":
            column = clip(column, **arguments)
        elif step == "bound":
            if (at := arguments.pop("at", None)) is None:
                known = column[~column.isnan()]
                if name not in references and len(known):
                    references[name] = float(known.double().mean())
                at = references.get(name, 0.0)
            column = bound(column, at, **arguments)
        elif step == "modulate":
            column = modulate(column, columns[arguments.pop("by")], **arguments)
        else:
            column = confidence(column, columns[arguments["by"]], groups)
    return column


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
