"""Which steps a reward's score goes through, and which rewards come first; a config asks without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

# The order in which a reward's steps are applied; the last two read another reward, too.
STEPS = ("clip", "bound", "modulate", "confidence")
Steps = Mapping[str, Mapping[str, Any]]  # {step: its arguments}


def reads(steps: Steps) -> list[str]:
    """Names of the other rewards that a reward's steps read."""
    return [steps[step]["by"] for step in ("modulate", "confidence") if step in steps]


def in_order(steps: Mapping[str, Steps]) -> list[str]:
    """The rewards' names, each after those that it reads; ValueError, with a name, if they read in a ring."""
    graph = {name: [other for other in reads(one) if other in steps] for name, one in steps.items()}
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise ValueError(next(name for name in steps if name in error.args[1])) from None


def needed(steps: Mapping[str, Steps], names: list[str]) -> set[str]:
    """`names` and what their steps read, directly or through others."""
    result, waiting = set(names), list(names)
    while waiting:
        others = reads(steps.get(waiting.pop(), {}))
        waiting += [other for other in others if other not in result]
        result |= set(others)
    return result
