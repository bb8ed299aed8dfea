"""What a run says of itself: a reward that tells its images apart no more, one that eats the memory, and a training
that computes in another way than the rollout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import psutil

from diffrl.rewards.scoring import Scorer
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook

# Epochs in a row of growth before it is called a leak. Caches fill up once, and the allocator's gaps settle slowly: the
# playground's reward, whose live memory stays the same to 2 MiB, makes the process larger for some ten epochs.
EPOCHS = 10
LEAST = 2**20  # bytes of growth in each of them
SHARE = 0.02  # of the machine's memory: growth over them that is worth a word
# Mean difference of a step's log-probability in training from the rollout's, with the same LoRA. It is half the mean
# square of what the two means differ by, in standard deviations of the step: 0.005 is a tenth of one. At 0.002 the
# gradient has a cosine of 0.999 with the right one, at 0.1 one of 0.9 to 0.7.
MISMATCH = 0.005
NARROW = 1e-5  # standard deviation far below the 1e-4 that is added to it where advantages divide by it


class Suspicions(RunHook):
    """Remembers what was said, so that each thing is said once, and again only when it got worse.

    Args:
        names: the optimised rewards.
        shaped: those of them whose scores are reshaped before advantages are made of them.
        memory: bytes that the machine has; None: of this one.
        scorer: of training images.
    """

    def __init__(
        self,
        names: Sequence[str],
        shaped: Collection[str] = (),
        memory: int | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self.names, self.shaped, self.scorer = list(names), set(shaped), scorer
        self.memory = psutil.virtual_memory().total if memory is None else memory
        self._off = 0.0
        self._flat: set[str] = set()
        self._narrow: set[str] = set()
        self._growth: dict[str, list[int]] = {}
        self._warned: dict[str, int] = {}

    def after_epoch(self, metrics: dict[str, Any]) -> Sequence[str]:
        return self.after(metrics, self.scorer.take_growth() if self.scorer is not None else {})

    def after(self, metrics: Mapping[str, Any], growth: Mapping[str, int]) -> list[str]:
        """Sentences for the console after an epoch. `growth`: bytes that the process gained in each reward's calls."""
        missing = {key.removeprefix("unscored/"): n for key, n in metrics.items() if key.startswith("unscored/")}
        lines = [f'reward "{name}": no score for {n} images in epoch {metrics["epoch"]}' for name, n in missing.items()]
        return [*lines, *self._without_spread(metrics), *self._mismatch(metrics), *self._leaks(growth)]

    def _mismatch(self, metrics: Mapping[str, Any]) -> list[str]:
        off = metrics.get("rollout/mismatch") or 0.0
        if off < max(MISMATCH, 2 * self._off):
            return []
        self._off = off
        return [
            f"WARNING: before any update, training gives the rollout's steps another log-probability, by {off:.2g} in "
            f"the mean of epoch {metrics['epoch']} (rollout/mismatch): it computes in another way than the rollout, so "
            "its gradient is off; try optimise.precision=fp32, engine.compile=false, or a larger rollout.noise_level"
        ]

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
                    "its scores up in a reward of your own"
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
            if len(recent) < EPOCHS or min(recent) < LEAST or total < SHARE * self.memory or not worse:
                continue
            self._warned[name] = sum(past)
            each = total / EPOCHS / 2**20
            warnings.append(
                f'WARNING: in the calls of reward "{name}" the process grew by {each:.0f} MiB an epoch over the last '
                f"{EPOCHS}, {total / self.memory:.0%} of the machine's memory; if that does not end, the memory will: "
                "look for tensors or results that it keeps"
            )
        return warnings


def add_suspicions(build: Build) -> None:
    rewards, asking = build.config.rewards, build.scorer.asking
    shaped = [name for name, reward in rewards.items() if reward.shape.steps()]
    build.add(Suspicions([name for name in rewards if name not in asking], shaped, scorer=build.scorer))
