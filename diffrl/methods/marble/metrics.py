"""What MARBLE shows of its optimiser steps; K rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffrl.methods.marble.simplex import Array


@dataclass(frozen=True)
class Record:
    """What an optimiser step shows: coefficients (K,); norms and cosines to d (K,), NaN without signal or measure."""

    alpha: Array
    norm: Array
    cosine: Array

    def plain(self) -> dict[str, list[float | None]]:
        """In four digits, None for NaN."""
        named = {"alpha": self.alpha, "norm": self.norm, "cos": self.cosine}
        return {name: [None if np.isnan(x) else float(f"{x:.4g}") for x in row] for name, row in named.items()}


def summary(records: Sequence[Record], names: Sequence[str], solved: bool) -> dict[str, Any]:
    """Means over the epoch's steps, of `cos_min` the least; None where no step knows it. `marble/steps` has them
    one by one, as JSON: a list of {alpha, norm, cos}, each in the order of the rewards.

    `solved`: are there coefficients of each reward at all?
    """
    if not records:  # all overflowed
        return {}
    alpha, norm, cosine = (np.array([getattr(r, name) for r in records]) for name in ("alpha", "norm", "cosine"))
    measured = cosine[~np.isnan(cosine).all(1)]
    steps = [row[~np.isnan(row)] for row in measured]  # rewards with signal
    least = [float(row.min()) for row in steps]
    values: dict[str, Any] = {}
    for k, name in enumerate(names):
        if solved:
            values[f"marble/alpha/{name}"] = float(alpha[:, k].mean())
        values[f"marble/norm/{name}"] = _mean(norm[:, k][~np.isnan(norm[:, k])])
    values["marble/cos_min"] = min(least) if least else None
    values["marble/cos_mean"] = _mean([row.mean() for row in steps])
    values["marble/cos_var"] = _mean([row.var() for row in steps])
    values["marble/conflict"] = _mean([value < 0 for value in least])  # rate of steps against some reward
    values["marble/steps"] = json.dumps([r.plain() for r in records])
    return values


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None
