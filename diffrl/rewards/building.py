"""Builds the rewards of a run: equal ones once, each on its device, with what their entries ask around them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from diffrl.errors import UserError
from diffrl.rewards.protocol import Reward, ability, find_offloaded
from diffrl.rewards.registry import load_reward, takes

# Abilities of rewards whose calls are more than scores: these can be neither kept nor moved.
CHANGING = {"learns": "learns, so it changes while it trains", "batchwise": "judges whole batches"}


def unmovable(reward: object) -> str | None:
    """Why a reward, or its class, can be neither kept nor moved; None: it can."""
    return next((why for able, why in CHANGING.items() if ability(reward, able)), None)


def check_movable(name: str, plugin: str, asked: str, reward: object) -> None:
    """UserError where the entry `name` asks for `cache` or `offload`, and the reward, or its class, has none."""
    if (why := unmovable(reward)) is not None:
        raise UserError(f'{name}: {asked}: the reward "{plugin}" {why}; leave it out')


@dataclass(frozen=True)
class Entry:
    """What a config says of one reward. `plugin`: a name or `path/to/file.py:Class`. `column`: of its answers."""

    plugin: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    offload: Literal[False, True, "apart"] = False
    column: str | None = None


def build_rewards(entries: Mapping[str, Entry], device: torch.device) -> dict[str, Reward]:
    """The rewards by name. Those that run on a device get `device` unless their entry names one.

    Two entries with the same plugin and arguments share one reward. On the CPU, and
    on an Apple device, whose memory is the CPU's, there is nothing to offload.
    Raises `UserError` as `load_reward` does, and for an entry that asks for what its reward cannot do.
    """
    plain: dict[str, Reward] = {}
    offloaded: dict[str, Reward] = {}
    cached: dict[tuple[str, str, str], Reward] = {}
    rewards: dict[str, Reward] = {}
    for name, entry in entries.items():
        arguments, column = dict(entry.arguments), entry.column
        if "column" in arguments and not takes(entry.plugin, "column"):  # of a command line
            column = arguments.pop("column")
        if "device" not in arguments and takes(entry.plugin, "device"):
            arguments["device"] = str(device)
        key = json.dumps([entry.plugin, arguments], sort_keys=True, default=repr)
        if key not in plain:
            plain[key] = load_reward(entry.plugin, **arguments)
        reward = plain[key]
        if entry.offload or entry.cache is not None:
            check_movable(name, entry.plugin, "offload" if entry.offload else "cache", reward)
        try:
            if entry.offload and _place(reward) not in ("cpu", "mps"):
                from diffrl.rewards.offloading import Offloaded

                reward = offloaded[key] = offloaded.get(key) or Offloaded(reward, entry.offload == "apart")
            if entry.cache is not None:
                from diffrl.rewards.wrappers import Cached, identity_for_cache

                cache = (key, entry.cache, str(entry.offload))  # one for all columns of a reward
                if cache not in cached:
                    identity = identity_for_cache(entry.plugin, entry.arguments, plain[key])
                    cached[cache] = Cached(reward, entry.cache, identity)
                reward = cached[cache]
            if column is not None:
                from diffrl.rewards.columns import Column

                reward = Column(reward, column)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        if names := ability(reward, "columns"):
            text = f'the reward "{reward.name}" has the columns {", ".join(names)}'
            raise UserError(f"{name}: {text}; choose one: column")
        rewards[name] = reward
    _check_shared(entries, rewards)
    return rewards


def _place(reward: Reward) -> str:
    device = ability(reward, "device")
    return "" if device is None else torch.device(device).type


def _check_shared(entries: Mapping[str, Entry], rewards: Mapping[str, Reward]) -> None:
    """Weights that two rewards share are offloaded by both or by neither: one would miss them while it is called."""
    if not any(entry.offload for entry in entries.values()):
        return
    from diffrl.rewards.offloading import modules_of

    owner: dict[int, str] = {}
    for name, reward in rewards.items():
        if not entries[name].offload:
            owner |= dict.fromkeys(map(id, modules_of(reward)), name)
    for name, reward in rewards.items():
        inner = find_offloaded(reward)
        for module in inner.modules if inner is not None else ():
            if id(module) in owner:
                text = f'its weights are shared with "{owner[id(module)]}"; offload both or neither'
                raise UserError(f"{name}: offload: {text}")
