"""What makes a run this run: all that shaped its past, kept in every checkpoint and compared by a resume
(`diffrl.records.changes`).

An identity is a flat table {dotted key: value} of the config's values that shape training, and beside them what the
names in it stood for: the prompts' texts, the model's files, the rewards' code, the package's version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from diffrl.version import __version__

Identity = dict[str, Any]
VERSION = "diffrl_version"

# What a resume may change on its own, by key or section: how long, what is measured and kept, on which devices.
FREE = (
    *("epochs", "run_dir", "evaluate", "guard", "checkpoint", "tracking", "prompts.test", "prompts.overlap"),
    *("rollout.batch_size", "optimise.micro_batch", "optimise.gradient_checkpointing"),
    *("engine.attention", "engine.compile", "engine.encoders", "engine.decode"),
    "image_set.cache",
)
NOT_FREE = ("evaluate.features",)  # diversity shapes GARDO's advantages, and a curve has one feature space
# How a reward is called, and not what it says; `device` and `batch_size` are arguments that many plugins have.
FREE_OF_REWARDS = (
    "retries",
    "timeout",
    "unscored",
    "cache",
    "offload",
    "device",
    "batch_size",
)


def identity_of_config(values: Mapping[str, Any], used: Collection[str] = ()) -> Identity:
    """The part that a resolved config has by itself.

    `used`: the watched rewards that training reads (of the others a run may watch what it likes).
    """
    from diffrl.hub import plain

    identity: Identity = {VERSION: __version__}
    for key, value in flat(values).items():
        top, _, rest = key.partition(".")
        if within(key, FREE) and not within(key, NOT_FREE):
            continue
        if top in ("rewards", "watch"):
            name, _, option = rest.partition(".")
            if (top == "watch" and name not in used) or within(option, FREE_OF_REWARDS):
                continue
        identity[key] = plain(value)
    return identity


def within(key: str, sections: Iterable[str]) -> bool:
    """Is a dotted key one of these keys, or in one of these sections?"""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; empty ones stay."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return result
