"""What a run says about its rewards: one that tells its images apart no more, and one that eats the memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

EPOCHS = 5  # in a row, before growth is called a leak: caches and allocators fill up once
LEAST = 2**20  # bytes of growth in each of them
TOTAL = 32 * 2**20  # bytes of growth over them
NARROW = 1e-5  # standard deviation far below the 1e-4 that is added to it where advantages divide by it


class Suspicions:
    """Remembers what was said, so that each thing is said once, and again only when it got worse.

    Args:
        names: the optimised rewards.
        shaped: those of them whose scores are reshaped before advantages are made of them.
    """

    def __init__(self, names: Sequence[str], shaped: Collection[str] = ()) -> None:
        self.names, self.shaped = list(names), set(shaped)
        self._flat: set[str] = set()
        self._narrow: set[str] = set()
        self._growth: dict[str, list[int]] = {}
        self._warned: dict[str, int] = {}

    def after(self, metrics: Mapping[str, Any], growth: Mapping[str, int]) -> list[str]:
        """Sentences for the console after an epoch. `growth`: bytes that the process gained in each reward's calls."""
        return [*self._without_spread(metrics), *self._leaks(growth)]

    def _without_spread(self, metrics: Mapping[str, Any]) -> list[str]:
        warnings = []
        for name in self.names:
            mean, std = metrics.get(f"reward/{name}"), metrics.get(f"reward/{name}/std")
            flat = mean is None or std is None or std <= 1e-6 * abs(mean)
            if flat and name not in self._flat:
                what = "applied to none of the images" if mean is None else f"gave all images the same score, {mean:g},"
                warnings.append(
                    f'WARNING: reward "{name}" {what} in epoch {metrics["epoch"]}: nothing is learned from it'
                )
            self._flat = self._flat | {name} if flat else self._flat - {name}
            narrow = not flat and std is not None and std < NARROW and name not in self.shaped
            if narrow and name not in self._narrow:
                warnings.append(
                    f'WARNING: reward "{name}" differs by only {std:.1e} (standard deviation) in epoch '
                    f"{metrics['epoch']}; advantages divide by the deviation + 1e-4, so little is learned: scale "
                    f"its scores up (rewards.{name}.shape.standardise)"
                )
            self._narrow = self._narrow | {name} if narrow else self._narrow - {name}
        return warnings

    def _leaks(self, growth: Mapping[str, int]) -> list[str]:
        warnings = []
        for name, size in growth.items():
            past = self._growth.setdefault(name, [])
            past.append(size)
            recent, total = past[-EPOCHS:], sum(past[-EPOCHS:])
            worse = sum(past) >= 2 * self._warned.get(name, 0)
            if len(recent) < EPOCHS or min(recent) < LEAST or total < TOTAL or not worse:
                continue
            self._warned[name] = sum(past)
            each = total / EPOCHS / 2**20
            warnings.append(
                f'WARNING: in the calls of reward "{name}" the process grew by {each:.0f} MiB in each of the last '
                f"{EPOCHS} epochs; if that does not end, the memory will: look for tensors or results that it keeps"
            )
        return warnings
