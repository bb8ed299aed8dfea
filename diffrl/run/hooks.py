"""What is added to a run: `RunHook`, whose methods are called at fixed moments, in the order of the run's hooks.

Every process has the same hooks in the same order and calls them together, so a hook may exchange tensors. `Monitor` is
what whatever takes long reports to, and may be stopped by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from torch import Tensor

from diffrl.objectives.advantages import ScoredBatch
from diffrl.rollout import Rollout


def _nothing(*_: Any) -> None:
    pass


@dataclass
class Monitor:
    """`status` shows what the run does, `note` prints a line; `check` may raise, where the run can be left."""

    status: Callable[[str], None] = _nothing
    note: Callable[[str], None] = _nothing
    check: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Measured:
    """An evaluation's metrics, and by name one value for each held-out prompt (None: the reward does not apply)."""

    metrics: Mapping[str, Any]
    prompts: Mapping[str, list[float | None]]


class RunHook:
    """A part of a run that the loop does not know; a hook defines those methods that it needs."""

    name = ""  # of its state in checkpoints
    lower: frozenset[str] = frozenset()  # of the metrics that it adds to evaluations, those that are better if lower

    def prepare(self) -> None:
        """Called at each start, before a checkpoint is restored."""

    def begin(self, epoch: int) -> None:
        """Called at each start, before `epoch` (from 0), the first one that is trained."""

    def on_images(self, images: Tensor, first: int) -> None:
        """A batch (b, 3, H, W) in [0, 1] of an epoch's images on this process, from the global number `first` on."""

    def after_rollout(self, epoch: int, rollout: Rollout, scored: ScoredBatch) -> Mapping[str, float | None]:
        """Called when an epoch (from 0) is drawn and has its advantages; returns metrics of the epoch."""
        return {}

    def before_run(self) -> None:
        """Called on the main process when a checkpoint is restored, before the console shows what is trained."""

    def on_evaluate(self, epoch: int, evaluated: bool) -> Measured | None:
        """Called after each epoch (from 1; 0: before training), whether the run evaluates it or not."""
        return None

    def alarms(self, metrics: dict[str, Any]) -> Sequence[str]:
        """Called when an evaluation has all its values, and may add to them; returns what is wrong with the run.

        With `guard.stop` the run ends for that.
        """
        return ()

    def on_samples(self, epoch: int, paths: Sequence[Path], prompts: Sequence[str]) -> None:
        """Called on the main process when an evaluation's sample images, of these prompts, are on the disk."""

    def after_epoch(self, metrics: dict[str, Any]) -> Sequence[str]:
        """May add to an epoch's metrics before they are logged; returns lines for the console."""
        return ()

    def on_line(self, line: Mapping[str, Any]) -> None:
        """Called on the main process when an epoch (0: before training) has its line in `metrics.jsonl`."""

    def end_epoch(self, metrics: Mapping[str, Any], last: bool) -> None:
        """Called when all of an epoch (from 1) is on the disk; `last`: the run ends with it."""

    def left(self) -> None:
        """Called on the main process when a signal has ended the run, and what it goes on from is on the disk."""

    def after_run(self, error: BaseException | None) -> Iterable[RenderableType]:
        """Called on the main process when the run has ended, by `error` or in order; returns what the console shows."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What shapes the future, by flat names: tensors, and what JSON takes."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""


def states(hooks: Sequence[RunHook]) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]:
    """The hooks' states by their names, tensors apart from the rest; hooks without a state are left out."""
    found = {hook.name: hook.state_dict() for hook in hooks if hook.name}
    tensors = {name: {k: v for k, v in state.items() if isinstance(v, Tensor)} for name, state in found.items()}
    others = {name: {k: v for k, v in state.items() if not isinstance(v, Tensor)} for name, state in found.items()}
    return {k: v for k, v in tensors.items() if v}, {k: v for k, v in others.items() if v}
