"""What differs between a run's identity then and now, and which of it a resume may change."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diffrl.errors import UserError, nearest
from diffrl.records.identity import within

# What the stored tensors and the methods' states are made for: no override helps, only a new run.
STRUCTURE = ("model", "objective", "lora", "engine.optimiser")
ALLOWED = "epochs, evaluate, guard, checkpoint, tracking, batch_size of the rollout, devices and processes"


@dataclass(frozen=True)
class Change:
    """One key that differs; None: not there."""

    key: str
    then: Any
    now: Any


def compare(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    where: str,
    override: Iterable[str] = (),
    stateful: Collection[str] = (),
) -> list[Change]:
    """The differences, all of them allowed by `override` (keys or sections).

    Args:
        then: the identity of the checkpoint; now: that of this start.
        where: the checkpoint, for messages.
        stateful: sections of methods that keep a state, which no override switches on or off.

    Raises:
        UserError: at the first key that differs and may not, with what can be done; for an override that names nothing.
    """
    accepted = list(override)
    keys = dict.fromkeys([*then, *now])
    for word in accepted:
        if not any(within(_plain(key), (word,)) for key in keys):
            names = {_plain(key) for key in keys} | {_plain(key).partition(".")[0] for key in keys}
            raise UserError(f'--override: "{word}" is nothing that a resume compares{nearest(word, names)}')
    changes = [
        Change(key, then.get(key), now.get(key))
        for key in keys
        if (key in then) != (key in now) or then.get(key) != now.get(key)
    ]
    # First what no override helps: a user who has allowed all the rest should not learn of it only then.
    for change in sorted(changes, key=lambda change: _structure(change, then, now, stateful) is None):
        _judge(change, then, now, where, accepted, stateful)
    return changes


def _judge(
    change: Change,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    where: str,
    accepted: Collection[str],
    stateful: Collection[str],
) -> None:
    plain = _plain(change.key)
    repository = change.key.partition(" (commit of ")[2].rstrip(")")
    if repository and change.then and change.now:
        text = f"{plain}: {repository} is at commit {change.now}, but {where} was trained with commit {change.then}"
        text += f"; name {repository}@{change.then} to go on with that"
    elif plain != change.key:
        text = f"{plain}: the {change.key[len(plain) + 2 : -1]} changed since {where}"
    else:
        past = f"with {show(change, then)}" if change.key in then else "without it"
        text = f"{plain}: {show(change, now)}, but {where} was trained {past}"
    if (structure := _structure(change, then, now, stateful)) is not None:
        raise UserError(f"{text}; {structure}: start a new run (run_dir=...)")
    if not within(plain, accepted):
        raise UserError(f"{text}; a resume may change {ALLOWED}; to change {plain} on purpose, add --override {plain}")


def _structure(
    change: Change, then: Mapping[str, Any], now: Mapping[str, Any], stateful: Collection[str]
) -> str | None:
    """Why no override can help, or None."""
    plain = _plain(change.key)
    if plain == change.key and within(plain, STRUCTURE):
        return "the checkpoint's tensors are made for that"
    if plain == "optimise.ema.decay" and bool(change.then) != bool(change.now):
        return "the checkpoint has an average of the weights, or has none"
    for method in stateful:
        if within(plain, (method,)) and _has(then, method) != _has(now, method):
            return f"{method} keeps a state of its own"
    for table in ("rewards", "watch"):
        names = [{key.split(".")[1] for key in side if key.startswith(f"{table}.")} for side in (then, now)]
        if plain.startswith(f"{table}.") and names[0] != names[1]:
            return "the methods' states have one entry for each reward"
    return None


def show(change: Change, side: Mapping[str, Any]) -> str:
    """A value in a message."""
    if change.key not in side:
        return "not set"
    text = json.dumps(side[change.key])
    return text if len(text) <= 60 else text[:57] + "..."


def _has(side: Mapping[str, Any], section: str) -> bool:
    return any(within(key, (section,)) for key in side)


def _plain(key: str) -> str:
    """`prompts.train (texts)` without what stands in brackets."""
    return key.partition(" (")[0]
