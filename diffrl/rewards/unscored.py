"""Images without a score: a judge may refuse one, and no run ends for that, as long as they are few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor

from diffrl.rewards.protocol import RewardError
from diffrl.stats import wilson

BOUND = 0.02  # share of the images that a reward is asked about, in an epoch or an evaluation


class Tally:
    """How many images each of the rewards `names` was asked about, and for how many it had no score.

    bounds: {name: share}; BOUND without one.
    """

    def __init__(self, names: Sequence[str], bounds: Mapping[str, float] | None = None) -> None:
        self.names, self.bounds = list(names), dict(bounds or {})
        self._asked, self._none = Counter[str](), Counter[str]()
        self._lock = Lock()
        self._why: dict[str, str] = {}

    def count(self, name: str, scores: Tensor, why: str = "") -> None:
        """Counts a call's scores (b,), or (b, C): a row of NaN alone is none."""
        none = scores.isnan() if scores.ndim == 1 else scores.isnan().all(1)
        with self._lock:  # rewards of other machines are asked in several threads
            self._asked[name] += len(scores)
            self._none[name] += int(none.sum())
            if why:
                self._why.setdefault(name, why)

    def take(self, together: Callable[[Tensor], Tensor], prefix: str = "unscored/") -> dict[str, int]:
        """{prefix + name: images without a score} since this was last asked, where there are any, over all processes.

        together: the sum of a tensor over processes; all come to it.

        Raises `RewardError` where they are more than chance explains at the bound: the low end of Wilson's 95 %
        interval is above it. So one image never ends a run (but with a bound of 0), and many do.
        """
        counts = torch.tensor([[self._asked[name], self._none[name]] for name in self.names], dtype=torch.int64)
        rows = together(counts.view(-1, 2)).tolist()
        why, self._why = self._why, {}
        self._asked.clear()
        self._none.clear()
        found = {name: (int(none), int(asked)) for name, (asked, none) in zip(self.names, rows, strict=True) if none}
        for name, (none, asked) in found.items():
            bound = self.bounds.get(name, BOUND)
            if (none > 1 or bound == 0.0) and wilson(none, asked)[0] > bound:
                reason = f" (the first: {why[name]})" if name in why else ""
                raise RewardError(
                    f'reward "{name}" had no score for {none} of {asked} images{reason}, more than its '
                    f"`unscored: {bound:g}` allows: look at its answers, or raise the bound"
                )
        return {prefix + name: none for name, (none, _) in found.items()}
