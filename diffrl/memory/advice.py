"""What to change so that a config fits into a device's memory, and costs least time.

Nothing of it changes what is learned: rewards that wait in main memory, more and smaller micro-batches, activations
recomputed, smaller forwards. Smaller micro-batches take no more arithmetic (unless they split groups that a method
would measure), and recomputing takes a forward more, so that it is asked for where a micro-batch of one row would be
too large without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from diffrl.config import Config
from diffrl.memory.counted import Counted
from diffrl.memory.fit import CONTEXT, ENCODING, REWARDS, SCORING, SLACK, Fit, estimate
from diffrl.memory.reward_memory import reward_memory

SAMPLING, DECODING, TRAINING = "sampling", "decoding", "training"
RECOMPUTE, ROWS, BATCH = "optimise.gradient_checkpointing", "optimise.micro_batch", "rollout.batch_size"


def advise(
    config: Config,
    free: int,
    world: int = 1,
    fit: Fit | None = None,
    sharded: bool = False,
    counted: Counted | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Fit, list[str]] | None:
    """The fastest setting that fits into `free` bytes and overrides that make it, none if the config fits; None:
    nothing helps.

    `fit`: the config's estimate, if it is known; `counted`: what it was counted with.
    """
    counted = counted or Counted()
    fit = estimate(config, world, sharded, counted, tell=tell) if fit is None else fit
    changed: dict[str, Any] = {}

    def attempt(changes: Mapping[str, Any], phase: str, before: Fit) -> Fit:
        """The estimate with these changes, of which only this phase is counted anew."""
        others = {name: size for name, size in before.peaks.items() if not name.startswith(phase)}
        return estimate(_with(config, changes), world, sharded, counted, replace(before, peaks=others), tell)

    # Back-propagated rewards stay where the graph is.
    movable = () if config.method.decodes or config.d2align is not None else reward_memory(config).keys
    if fit.total > free and REWARDS in fit.parts and movable:
        changed |= dict.fromkeys(movable, True)
        fit = attempt(changed, SCORING, fit)
    if CONTEXT + int(SLACK * sum(fit.parts.values())) > free:
        return None  # what is there all the time is too much alone
    if _needed(fit, ENCODING) > free and config.engine.encoders == "beside" and not sharded:
        changed["engine.encoders"] = "apart"
        fit = attempt(changed, ENCODING, fit)
    if _needed(fit, DECODING) > free and config.engine.decode != 1:
        changed["engine.decode"] = 1
        fit = attempt(changed, DECODING, fit)
    while _needed(fit, SAMPLING) > free and (batch := changed.get(BATCH, config.rollout.batch_size)) > 1:
        changed[BATCH] = batch // 2
        fit = attempt(changed, SAMPLING, fit)
    if _needed(fit, TRAINING) > free:
        found = _trained(config, fit, changed, free, attempt)
        if found is None:
            return None
        fit, changed = found
    if _needed(fit, SCORING) > free and not sharded:
        changed |= dict.fromkeys(movable, "apart")
        fit = attempt(changed, SCORING, fit)
    if fit.total > free:
        return None
    return fit, [f"{key}={str(value).lower()}" for key, value in changed.items()]


def _trained(
    config: Config, known: Fit, changed: Mapping[str, Any], free: int, attempt: Callable[..., Fit]
) -> tuple[Fit, dict[str, Any]] | None:
    """The cheaper one of the largest micro-batches with and without recomputing; None: none fits."""
    found: tuple[Fit, dict[str, Any]] | None = None
    for recompute in sorted({config.optimise.gradient_checkpointing, True}):
        own = {**changed} | ({} if recompute == config.optimise.gradient_checkpointing else {RECOMPUTE: recompute})
        start = attempt(own, TRAINING, known) if RECOMPUTE in own else known
        candidate = _largest(start, own, free, partial(attempt, phase=TRAINING, before=known))
        if candidate is None:
            continue
        if found is None or candidate[0].work[TRAINING] < found[0].work[TRAINING]:
            found = candidate
        if found[0].work[TRAINING] <= known.work[TRAINING]:
            break  # recomputing could only cost more
    return found


def _largest(
    fit: Fit, changes: dict[str, Any], free: int, attempt: Callable[[Mapping[str, Any]], Fit]
) -> tuple[Fit, dict[str, Any]] | None:
    """The largest micro-batch that fits, at most that of `fit`: memory grows as a line with its rows.

    From two on: a batch of one lies in memory as if it were transposed already, so that some copies are not made.
    """
    if _needed(fit, TRAINING) <= free:
        return fit, changes
    for few in (2, 1) if fit.rows > 2 else (1,):
        least = attempt(changes | {ROWS: few})
        if _needed(least, TRAINING) <= free:
            break
    else:
        return None
    slope = (_needed(fit, TRAINING) - _needed(least, TRAINING)) / max(fit.rows - least.rows, 1)
    rows = int(least.rows + (free - _needed(least, TRAINING)) / slope) if slope > 0 else few
    while (rows := min(rows, fit.rows - 1)) > few:
        found = attempt(changes | {ROWS: rows})
        if _needed(found, TRAINING) <= free:
            return found, changes | {ROWS: rows}
        rows -= 1
    return least, changes | {ROWS: few}


def _needed(fit: Fit, phase: str) -> int:
    """What a device should have free for this phase."""
    peak = max((size for name, size in fit.peaks.items() if name.startswith(phase)), default=0)
    return CONTEXT + int(SLACK * (sum(fit.parts.values()) + peak))


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    for key, value in changes.items():
        section, *reward, name = key.split(".")
        before = getattr(config, section)
        if reward:
            after = before | {reward[0]: before[reward[0]].model_copy(update={name: value})}
        else:
            after = before.model_copy(update={name: value})
        config = config.model_copy(update={section: after})
    return config
