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

from diffrl.rewards.order import STEPS, Steps, in_order


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
        from diffrl.rewards.steps import bound, clip, confidence, modulate

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
