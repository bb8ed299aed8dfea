"""A reward's entry in a config: the plugin with its arguments, and how its score is composed before it is optimised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, model_serializer

from diffrl.config.base import PathText, Problem, Section, key, section
from diffrl.errors import nearest
from diffrl.rewards.order import in_order, needed


class Clip(Section):
    low: FiniteFloat | None = key(None, "lower scores count as this; null: no bound")
    high: FiniteFloat | None = key(None, "higher scores count as this; null: no bound")


class Log(Section):
    scale: FiniteFloat = key(1.0, "the score at which the logarithm takes over", gt=0)


class Threshold(Section):
    at: FiniteFloat = key(0.5, "the least score that counts as 1")


class Standardise(Section):
    limit: FiniteFloat | None = key(None, "how far a score may lie from 0; null: no bound", "deviations", gt=0)


class Tame(Section):
    delta: FiniteFloat | None = key(
        None, "take the logarithm where std / |mean| of the score is above this; null: above its mean over the rewards"
    )
    slack: FiniteFloat = key(0.1, "once on, it stays on until that is this share below", ge=0, lt=1)


class Bound(Section):
    at: FiniteFloat | None = key(
        None, "the score that becomes 1/2; null: the mean of the first epoch, the base model's"
    )
    scale: FiniteFloat = key(1.0, "how far above that a score becomes 0.73", gt=0)


class WinRate(Section):
    """Nothing to choose."""


class Ensemble(Section):
    others: list[str] = key([], "the rewards, under rewards or watch, that are combined with this one; at least one")
    reduce: Literal["mean", "min", "lower"] = key("mean", "lower: mean - coefficient * deviation between the rewards")
    coefficient: FiniteFloat = key(1.0, "of the deviation; negative for a reward that is lower where it is better")


class Gate(Section):
    by: str = key("", "the reward, under rewards or watch, that decides")
    least: FiniteFloat = key(0.5, "its least score at which this reward counts")
    otherwise: FiniteFloat = key(0.0, "what the reward is below that; choose the low end of its range")


class Modulate(Section):
    by: str = key("", "the reward, under rewards or watch, that is the bonus; in [0, 1], as this one")
    base: FiniteFloat = key(0.4, "what this score counts where the bonus is 0; 1 where it is 1", ge=0, le=1)


class Shape(Section):
    """Steps from the plain score to what is optimised, applied in this order; present = on."""

    clip: Clip | None = key(None, "hold the score within bounds")
    log: Log | None = key(None, "sign(s) ln(1 + |s| / scale): tame what lies far out")
    tame: Tame | None = key(None, "ln(1 + s) while the score spreads wider than the others (PaCo-GRPO)")
    threshold: Threshold | None = key(None, "1 from a least score on, else 0")
    standardise: Standardise | None = key(None, "mean 0 and deviation 1 over an epoch's images")
    bound: Bound | None = key(None, "sigmoid((s - at) / scale): little is gained far above a reference (PAR)")
    win_rate: WinRate | None = key(None, "the share of the images of its group that an image beats")
    ensemble: Ensemble | None = key(None, "combine with other rewards: mean, minimum or lower bound")
    gate: Gate | None = key(None, "count only where another reward is high enough")
    modulate: Modulate | None = key(None, "s (base + (1 - base) by): base and bonus, not a sum (FIRM)")

    @model_serializer(mode="wrap")
    def _on(self, serialise: Any) -> dict[str, Any]:
        """Steps that are off are left out, or reading them again would switch them on."""
        return {name: value for name, value in serialise(self).items() if value is not None}

    def steps(self) -> dict[str, dict[str, Any]]:
        """{step: arguments} for `diffrl.rewards.compose`; a bound of null is left to its default."""
        return {
            name: {k: v for k, v in arguments.items() if v is not None} for name, arguments in self.model_dump().items()
        }


class Reward(BaseModel):
    """A reward plugin; keys beside these go to its constructor, too."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    weight: FiniteFloat = key(1.0, "factor of this reward's score in the sum that is optimised; not used under watch")
    plugin: PathText | None = key(None, "a plugin's name, or path/to/file.py:Class; null: the same as NAME")
    retries: int = key(0, "further attempts after the reward raised an exception", "attempts", ge=0)
    timeout: FiniteFloat | None = key(600.0, "how long one call may take; null: no limit", "seconds", gt=0)
    cache: PathText | None = key(None, "folder that keeps the scores of images seen before; null: none is kept")
    offload: bool = key(False, "keep the reward's weights in main memory between its calls")
    params: dict[str, Any] = key(
        {}, "arguments of the plugin's constructor; they may also stand beside weight and plugin"
    )
    shape: Shape = section(Shape, "from the score to what is optimised: steps in this order, each present = on")

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the plugin's constructor."""
        return {**self.params, **(self.model_extra or {})}


def check_shapes(rewards: Mapping[str, Reward], watch: Mapping[str, Reward]) -> None:
    """Raise Problem where steps name what is not there, read in a ring, have no effect, or can do nothing."""
    tables = {**dict.fromkeys(watch, "watch"), **dict.fromkeys(rewards, "rewards")}
    entries = {**watch, **rewards}
    for name, entry in entries.items():
        table = tables[name]
        where, shape = f"{table}.{name}.shape", entry.shape
        if shape.clip is not None:
            low, high = shape.clip.low, shape.clip.high
            if low is None and high is None:
                raise Problem(f"{where}.clip", "neither low nor high is given")
            if low is not None and high is not None and low >= high:
                raise Problem(f"{where}.clip", f"low {low:g} is not below high {high:g}")
        if shape.ensemble is not None:
            if not shape.ensemble.others:
                raise Problem(f"{where}.ensemble.others", "name at least one reward to combine this one with")
            for other in shape.ensemble.others:
                _check_other(f"{where}.ensemble.others", name, other, entries)
            if len(set(shape.ensemble.others)) < len(shape.ensemble.others):
                raise Problem(f"{where}.ensemble.others", "a reward is named twice")
        if shape.gate is not None:
            _check_other(f"{where}.gate.by", name, shape.gate.by, entries)
        if shape.modulate is not None:
            _check_other(f"{where}.modulate.by", name, shape.modulate.by, entries)
            check_unit(f"{where}.modulate", name, entry)
            check_unit(f"{where}.modulate.by", shape.modulate.by, entries[shape.modulate.by])
        if shape.tame is not None and shape.log is not None:
            raise Problem(f"{where}.tame", "log is on, too: the logarithm would be taken twice; leave one out")
        if shape.tame is not None and shape.tame.delta is None and (table == "watch" or len(rewards) < 2):
            raise Problem(
                f"{where}.tame.delta", "null is the mean over the optimised rewards, which needs two; give it"
            )
    _check_order(entries, tables)
    used = read_by_steps(rewards, watch)
    for name, entry in watch.items():
        if entry.shape.steps() and name not in used:
            text = "no reward reads it, and what is watched is reported as it is; leave the steps out"
            raise Problem(f"watch.{name}.shape", text)


def check_unit(where: str, name: str, entry: Reward) -> None:
    """Base and bonus lie in [0, 1], by the reward's card or by a step: a negative base would invert the bonus."""
    from diffrl.rewards.registry import declared_range

    if entry.shape.bound or entry.shape.threshold or entry.shape.win_rate:
        return
    if entry.shape.clip and entry.shape.clip.low == 0 and entry.shape.clip.high == 1:
        return
    low, high = declared_range(entry.plugin or name)
    if low < 0 or high > 1:
        text = (
            f'"{name}" is not declared to lie in [0, 1] (its card: {low:g} to {high:g}); add bound, clip or threshold'
        )
        raise Problem(where, text)


def _check_other(where: str, name: str, other: str, entries: Mapping[str, Reward]) -> None:
    if other == name:
        raise Problem(where, f'"{name}" names itself')
    if other not in entries:
        raise Problem(where, f'"{other}" is neither under rewards nor under watch{nearest(other, entries)}')


def _check_order(entries: Mapping[str, Reward], tables: Mapping[str, str]) -> None:
    try:
        in_order({name: entry.shape.steps() for name, entry in entries.items()})
    except ValueError as error:
        name = str(error)
        raise Problem(f"{tables[name]}.{name}.shape", f'"{name}" is read by what it reads itself') from error


def read_by_steps(rewards: Mapping[str, Reward], watch: Mapping[str, Reward]) -> list[str]:
    """The watched rewards that the steps of optimised ones read, directly or through others."""
    found = needed({name: entry.shape.steps() for name, entry in {**watch, **rewards}.items()}, list(rewards))
    return [name for name in watch if name in found]
