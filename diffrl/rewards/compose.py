"""From scores to what is optimised: each reward's column clipped, bounded, modulated or trusted, by its `steps`.

Symbols: N images of an epoch over all processes, K rewards. Columns are (N,) float, NaN = not applicable.
`bound` remembers its reference between epochs: it is in the composition's `state_dict`. No step makes a number of a
NaN or a NaN of a number. What is measured and reported stays the plain score: only advantages see the composed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.rewards.order import Steps, in_order


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
        if self.order:
            from diffrl.rewards.steps import applied

            for name in self.order:
                columns[name] = applied(name, self.steps[name], columns, groups, self.references)
        return torch.stack([columns[name] for name in self.names[: self.returned]], dim=1)

    def state_dict(self) -> dict[str, Any]:
        return {"references": dict(self.references)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.references = dict(state["references"])
