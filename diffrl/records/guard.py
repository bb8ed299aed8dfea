"""Guard rails against reward hacking: alarms that every run has, from what its evaluations measure.

An evaluation is the line of `metrics.jsonl` that has `eval/...` keys; the first one is the model before training.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffrl.records.held_out import FELL, HeldOut

Evaluation = Mapping[str, Any]
BREADTH = ("diversity", "variety", "saturation")  # what evaluations measure beside rewards


def gain(name: str, change: float, lower: Collection[str]) -> float:
    """A value's change, positive when it is for the better; 0 for what is neither good nor bad."""
    plain = name.rpartition("/")[2]
    if plain == "saturation":
        return 0.0
    return -change if name in lower or plain == "unreadable" else change


@dataclass(frozen=True)
class Alarm:
    """What has gone wrong: a key for `metrics.jsonl` ("parted/clip", "missing/clip", "diversity"), and a sentence."""

    name: str
    text: str


@dataclass(frozen=True)
class Guard:
    """Which alarms there are; the fields are those of the config's section `guard`.

    trained, watched: names of rewards; lower: those of them of which a lower score is better. evaluations: for how many
    in a row proxy and watched value must have parted; diversity: share of the base model's. None: no such alarm.
    """

    trained: Sequence[str]
    watched: Sequence[str]
    lower: Collection[str] = ()
    evaluations: int | None = 3
    diversity: float | None = 0.5

    def alarms(self, past: Sequence[Evaluation], held: HeldOut | None = None) -> list[Alarm]:
        """Those of the newest evaluation; `past` holds all of them, oldest first, `held` what each prompt scored."""
        held = held or HeldOut()
        result = self._missing(past)
        if self.evaluations is not None:
            result += [alarm for name in self.watched for alarm in self._parted(name, past, self.evaluations, held)]
        return result + self._narrowed(past) + self._saturated(past)

    def _missing(self, past: Sequence[Evaluation]) -> list[Alarm]:
        """What was measured before and cannot be measured any more: destroyed images have no variety to read."""
        students = dict.fromkeys(name.rpartition("/")[0] for name in self.watched)
        breadth = [f"{one}/{name}".lstrip("/") for one in ["", *filter(None, students)] for name in BREADTH]
        alarms = []
        for name in [*self.trained, *self.watched, *breadth]:
            key = f"eval/{name}"
            known = [line for line in past if _number(line.get(key)) is not None]
            if known and known[-1] is not past[-1]:
                text = f"{name} cannot be measured any more: it was {known[-1][key]:.3f} in epoch {known[-1]['epoch']}"
                alarms.append(Alarm(f"missing/{name}", text))
        return alarms

    def _parted(self, name: str, past: Sequence[Evaluation], least: int, held: HeldOut) -> list[Alarm]:
        """The proxy rises and a held-out value is worse than it was, by more than the choice of prompts explains, for
        `least` evaluations in a row."""
        key = f"eval/{name}"
        lines = [line for line in past if _number(line.get(key)) is not None]
        if len(lines) <= least:
            return []
        sign = -1.0 if name in self.lower else 1.0
        values = [sign * line[key] for line in lines]
        for end in range(len(lines) - least + 1, len(lines) + 1):
            best = max(range(end), key=values.__getitem__)
            loss, then, now = values[best] - values[end - 1], lines[best]["epoch"], lines[end - 1]["epoch"]
            worse = loss > FELL * abs(values[best]) and held.sure(name, loss, then, now)
            if not worse or not self._rose(lines[best], lines[end - 1]):
                return []
        best = max(range(len(values)), key=values.__getitem__)
        epochs, change = (lines[best]["epoch"], lines[-1]["epoch"]), (lines[best][key], lines[-1][key])
        text = (
            f"{name}, which is only watched, went from {change[0]:.3f} in epoch {epochs[0]} to {change[1]:.3f} in "
            f"epoch {epochs[1]}, while what is trained went up: for {least} evaluations in a row they have parted"
        )
        return [Alarm(f"parted/{name}", text)]

    def _rose(self, before: Evaluation, after: Evaluation) -> bool:
        """Is one of the trained rewards better than it was?"""
        for name in self.trained:
            first, last = before.get(f"eval/{name}"), after.get(f"eval/{name}")
            if first is not None and last is not None and (last < first if name in self.lower else last > first):
                return True
        return False

    def _narrowed(self, past: Sequence[Evaluation]) -> list[Alarm]:
        """Images of one prompt are less than a share as diverse as the base model's.

        On the playground the gold measure is asked: the distance of features also falls when mistakes go away.
        """
        name = "variety" if past[0].get("eval/variety") is not None else "diversity"
        base, now = (line.get(f"eval/{name}") for line in (past[0], past[-1]))
        if self.diversity is None or not base or now is None or now >= self.diversity * base:
            return []
        text = f"{name} is {now / base:.0%} of the base model's ({base:.3f} to {now:.3f}; the limit is"
        return [Alarm("diversity", f"{text} {self.diversity:.0%}): images of one prompt become alike")]

    def _saturated(self, past: Sequence[Evaluation]) -> list[Alarm]:
        """The images' mean saturation is outside of what single images of the base model have (mean +- 2 std)."""
        base, spread = past[0].get("eval/saturation"), past[0].get("eval/saturation/std")
        now = past[-1].get("eval/saturation")
        if base is None or spread is None or now is None or abs(now - base) <= 2 * spread:
            return []
        low, high = max(base - 2 * spread, 0.0), min(base + 2 * spread, 1.0)
        return [Alarm("saturation", f"saturation is {now:.2f}, the base model's images have {low:.2f} to {high:.2f}")]


def _number(value: Any) -> float | None:
    """What was measured; None for what was not, whether it is missing, null or not a number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
