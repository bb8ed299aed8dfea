"""What evaluations say of a run: hacked, collapsed, better or worse. Alarms, report, console and dial all ask here.

An evaluation is the line of `metrics.jsonl` that has `eval/...` keys; the first one is the model before training.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diffrl.errors import listed
from diffrl.records.held_out import HeldOut, gain

Evaluation = Mapping[str, Any]
BREADTH = ("diversity", "variety", "saturation")  # what evaluations measure beside rewards
MIN_RELATIVE_DROP = 0.05  # share of its best by which a watched value has to be worse, whatever a test says


@dataclass(frozen=True)
class Change:
    """What a held-out value changed by, and its standard error over prompts, None where it is not known.

    sign: 1 for better, -1 for worse, by the paired t-test over prompts; 0 where it finds neither, where no direction is
    better, and for what is 0 in all decimal places that are shown.
    """

    value: float
    error: float | None
    sign: int

    @property
    def text(self) -> str:
        return f"{self.value:+.{places(self.error)}f}"


def change(name: str, before: Evaluation, after: Evaluation, held: HeldOut, lower: Collection[str] = ()) -> Change:
    """Of `eval/NAME` between two evaluations that have it."""
    epochs, value = (before["epoch"], after["epoch"]), after[f"eval/{name}"] - before[f"eval/{name}"]
    plain = Change(value, held.change_error(name, *epochs), 0)
    if not held.significant(name, *epochs) or not float(plain.text):
        return plain
    better = gain(name, value, lower)
    return Change(value, plain.error, (better > 0) - (better < 0))


def places(error: float | None) -> int:
    """Decimal places: three, and up to five where an error is as small as that."""
    return next((digits for digits in (3, 4) if error is None or not 0 < error < 2 * 10**-digits), 5)


@dataclass(frozen=True)
class Finding:
    """What has gone wrong.

    kind: "parted" is hacking: of what is trained and a watched value. name: of what, where there are several. severity:
    "alarm", or "sign" where a value has not parted for long enough. text: a sentence without its dot.
    """

    kind: Literal["parted", "missing", "diversity", "saturation"]
    name: str
    severity: Literal["alarm", "sign"]
    text: str

    @property
    def key(self) -> str:
        """In `metrics.jsonl`, behind "alarm/"."""
        return f"{self.kind}/{self.name}" if self.name else self.kind


@dataclass(frozen=True)
class Guard:
    """The one judgement on hacking and collapse, with the limits of the config's section `guard`.

    trained, watched: names of rewards; lower: those of them of which a lower score is better. evaluations: for how many
    in a row proxy and watched value must have parted; diversity: share of the base model's. None: no such alarm.
    """

    trained: Sequence[str]
    watched: Sequence[str]
    lower: Collection[str] = ()
    evaluations: int | None = 3
    diversity: float | None = 0.5

    @classmethod
    def of(cls, config: Mapping[str, Any], lower: Collection[str]) -> Guard:
        """For a run's config, as `config.yaml` has it.

        On students nothing is optimised: there the trained rewards are watched, too.
        """
        trained, watch = (list(config.get(key) or {}) for key in ("rewards", "watch"))
        students = (config.get("evaluate") or {}).get("also") or {}
        every = dict.fromkeys([*trained, *watch])
        watched = [name for name in watch if name not in trained]
        watched += [f"{student}/{name}" for student in students for name in every]
        limits = {
            key: value for key, value in (config.get("guard") or {}).items() if key in ("evaluations", "diversity")
        }
        return cls(trained, watched, lower, **limits)

    def judge(self, past: Sequence[Evaluation], held: HeldOut | None = None) -> list[Finding]:
        """Of the newest evaluation; `past` holds all of them, oldest first, `held` what each prompt scored."""
        if not past:
            return []
        parted = [finding for name in self.watched for finding in self._parted(name, past, held or HeldOut())]
        return self._missing(past) + parted + self._narrowed(past) + self._saturated(past)

    def alarms(self, past: Sequence[Evaluation], held: HeldOut | None = None) -> list[Finding]:
        return [finding for finding in self.judge(past, held) if finding.severity == "alarm"]

    def _missing(self, past: Sequence[Evaluation]) -> list[Finding]:
        """What was measured before and cannot be measured any more: destroyed images have no variety to read."""
        students = dict.fromkeys(name.rpartition("/")[0] for name in self.watched)
        breadth = [f"{one}/{name}".lstrip("/") for one in ["", *filter(None, students)] for name in BREADTH]
        findings = []
        for name in [*self.trained, *self.watched, *breadth]:
            key = f"eval/{name}"
            known = [line for line in past if _number(line.get(key)) is not None]
            if known and known[-1] is not past[-1]:
                text = f"{name} cannot be measured any more: it was {known[-1][key]:.3f} in epoch {known[-1]['epoch']}"
                findings.append(Finding("missing", name, "alarm", text))
        return findings

    def _parted(self, name: str, past: Sequence[Evaluation], held: HeldOut) -> list[Finding]:
        """The proxy rises and a held-out value is worse than its best, by more than the choice of prompts explains, in
        the newest evaluations."""
        key = f"eval/{name}"
        lines = [line for line in past if _number(line.get(key)) is not None]
        values = [gain(name, line[key], self.lower) for line in lines]
        bests = [max(range(end), key=values.__getitem__) for end in range(1, len(values) + 1)]
        count, rising = 0, list[str]()
        for best, now in reversed([*zip(bests, range(len(values)), strict=True)]):
            loss, epochs = values[best] - values[now], (lines[best]["epoch"], lines[now]["epoch"])
            worse = loss > MIN_RELATIVE_DROP * abs(values[best]) and held.significant(name, *epochs) is not False
            risen = self._risen(lines[best], lines[now], held) if worse else []
            if not risen:
                break
            count, rising = count + 1, rising or risen
        if not count:
            return []
        before, after = lines[bests[-1]], lines[-1]
        verb = "rose" if after[key] > before[key] else "fell"
        text = f"{name}, which is only watched, {verb} from {before[key]:.3f} in epoch {before['epoch']} to "
        text += (
            f"{after[key]:.3f} in epoch {after['epoch']}, while the trained {listed(rising)} improved: they have parted"
        )
        text += f" in {count} evaluations in a row" if count > 1 else ""
        return [Finding("parted", name, "alarm" if count >= (self.evaluations or math.inf) else "sign", text)]

    def _risen(self, before: Evaluation, after: Evaluation, held: HeldOut) -> list[str]:
        """The trained rewards that are better than they were, on held-out prompts where they are measured there."""
        names = []
        for name in self.trained:
            for key in (f"eval/{name}", f"reward/{name}"):
                first, last = _number(before.get(key)), _number(after.get(key))
                if first is not None and last is not None:
                    noise = key[0] == "e" and held.significant(name, before["epoch"], after["epoch"]) is False
                    if gain(name, last - first, self.lower) > 0 and not noise:
                        names.append(name)
                    break
        return names

    def _narrowed(self, past: Sequence[Evaluation]) -> list[Finding]:
        """Images of one prompt are less than a share as diverse as the base model's.

        On the playground the gold measure is asked: the distance of features also falls when mistakes go away.
        """
        name = breadth(past)
        values = [_number(line.get(f"eval/{name}")) for line in past]
        base, now = values[0], values[-1]
        if self.diversity is None or not base or now is None or now >= self.diversity * base:
            return []
        healthy = [i for i, value in enumerate(values) if value is not None and value >= self.diversity * base]
        since = past[healthy[-1] + 1]["epoch"]
        text = f"{name} is {now / base:.0%} of the base model's ({base:.3f} to {now:.3f}; below the limit of"
        text += f" {self.diversity:.0%} since epoch {since}): images of one prompt become alike"
        return [Finding("diversity", "", "alarm", text)]

    def _saturated(self, past: Sequence[Evaluation]) -> list[Finding]:
        """The images' mean saturation is outside of what single images of the base model have (mean +- 2 std)."""
        base, spread = past[0].get("eval/saturation"), past[0].get("eval/saturation/std")
        now = past[-1].get("eval/saturation")
        if base is None or spread is None or now is None or abs(now - base) <= 2 * spread:
            return []
        low, high = max(base - 2 * spread, 0.0), min(base + 2 * spread, 1.0)
        text = f"saturation is {now:.2f}, the base model's images have {low:.2f} to {high:.2f}"
        return [Finding("saturation", "", "alarm", text)]


def breadth(past: Sequence[Evaluation]) -> str:
    """What the limit on diversity is about: variety where the first evaluation has it."""
    return "variety" if past and past[0].get("eval/variety") is not None else "diversity"


def _number(value: Any) -> float | None:
    """What was measured; None for what was not, whether it is missing, null or not a number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
