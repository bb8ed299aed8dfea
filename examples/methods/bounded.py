"""An add-on in one file: no advantage is larger than a bound. docs/methods/own.md says how it is installed; then

    diffrl train playground/nft bounded.most=1.5

It shows where an add-on may act: its keys, what it refuses (`check`), and what it adds to a run (`build`), here a
transform of advantages and a hook with a metric. One that changes the objective itself does so in `around`, as GARDO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffrl.config.base import Method, Problem, Section, key
from diffrl.objectives.advantages import ScoredBatch
from diffrl.rollout import Rollout
from diffrl.run.hooks import RunHook


class Bounded(Section):
    method = Method("bounded", "Bounded advantages", about="m tanh(A / m) in place of the advantage A", kind="wrapper")
    most: float = key(2.0, "m, the bound", gt=0)

    def check(self, config: Any) -> None:
        if config.method.advantages == "none":
            raise Problem("bounded", f'objective "{config.method.name}" uses no advantages')

    def build(self, build: Any) -> None:
        bound = Bound(self.most)
        build.objective.transforms.append(bound.transform)
        build.add(bound)


class Bound(RunHook):
    """Bounds advantages, and logs how near the largest of an epoch comes to the bound (`bounded/largest`, 0 to 1)."""

    def __init__(self, most: float) -> None:
        self.most, self.largest = most, 0.0

    def transform(self, advantages: Tensor, scored: ScoredBatch) -> Tensor:
        """Advantages (N, columns) or (N, T, columns), all of them within `most`."""
        bounded = self.most * (advantages / self.most).tanh()
        self.largest = float(bounded.abs().max()) / self.most
        return bounded

    def after_rollout(self, epoch: int, rollout: Rollout, scored: ScoredBatch) -> Mapping[str, float | None]:
        return {"bounded/largest": self.largest}
