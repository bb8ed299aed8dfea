"""Per-prompt scores of each evaluation, `RUN_DIR/held_out.jsonl`, for paired standard errors.

Evaluations draw the same prompts with the same seeds, so the error of a change is that of the prompts' differences: far
smaller than the two means' own errors, since most of what differs between prompts is the same before and after.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from diffrl.records.disk import append_line
from diffrl.stats import differences, known, significant, standard_error

NAME = "held_out.jsonl"
PROMPTS, SOLVER = "prompts.test (texts and number)", "evaluate (solver and size)"  # in environment.json, as digests
Values = Sequence[float | None]  # of each prompt, in their order; None where a reward does not apply


def gain(name: str, change: float, lower: Collection[str]) -> float:
    """A value's change, positive when it is for the better; 0 for what is neither good nor bad."""
    plain = name.rpartition("/")[2]
    if plain == "saturation":
        return 0.0
    return -change if name in lower or plain == "unreadable" else change


class HeldOut:
    """The values of each prompt by epoch and name: `clip`, `turbo/clip` on a student, `playground[color]` of a part.

    Unknown errors are None: of old runs, too.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, Mapping[str, Values]] = {}

    def mean(self, name: str, epoch: int) -> float | None:
        """Over the prompts to which it applies; None where there is none."""
        values = known(self.values(name, epoch))
        return float(values.mean()) if len(values) else None

    def count(self, name: str, epoch: int) -> int:
        """Of the prompts to which it applies."""
        return len(known(self.values(name, epoch)))

    def error(self, name: str, epoch: int) -> float | None:
        """The standard error over prompts of an epoch's mean."""
        return standard_error(self.values(name, epoch))

    def change_error(self, name: str, before: int, after: int) -> float | None:
        """The paired standard error over prompts of what changed between two epochs."""
        return standard_error(self.differences(name, before, after))

    def differences(self, name: str, before: int, after: int) -> np.ndarray:
        """(P,) what changed of each prompt between two epochs, NaN where it does not apply."""
        return differences(self.values(name, before), self.values(name, after))

    def significant(self, name: str, before: int, after: int) -> bool | None:
        """Does the 95 % interval of the change leave 0 out? None where there is no interval."""
        return significant(self.differences(name, before, after))

    def values(self, name: str, epoch: int) -> Values:
        return self.epochs.get(epoch, {}).get(name, ())

    def add(self, epoch: int, values: Mapping[str, Values]) -> None:
        """Those of an evaluation; a second one of the same epoch takes the first one's place."""
        self.epochs[epoch] = values

    def write(self, folder: Path, epoch: int) -> None:
        """Append an epoch's values to the run's file. DiskError if they cannot be written."""
        append_line(folder / NAME, json.dumps({"epoch": epoch, "values": self.epochs[epoch]}, allow_nan=False))


def read_held_out(folder: Path) -> HeldOut:
    """The run's file, as far as it can be read: a line that a crash has torn is passed over, no file gives none."""
    found = HeldOut()
    try:
        lines = (folder / NAME).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return found
    for line in lines:
        try:
            row = json.loads(line)
            values = {name: [None if v is None else float(v) for v in column] for name, column in row["values"].items()}
            found.add(int(row["epoch"]), values)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found
