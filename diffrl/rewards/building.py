"""Builds the rewards of a run: equal ones once, each on its device, with what their entries ask around them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from diffrl.errors import UserError
from diffrl.plugins import by_package, load
from diffrl.rewards.kinds import kind_of
from diffrl.rewards.protocol import Reward, ability, find_offloaded
from diffrl.rewards.registry import load_reward, takes

MOVING = ("offload", "cache")  # options that keep scores, or move weights
IN_CONFIGS = (*MOVING, "spatial")  # which are fields of a config's entry, and no arguments


def check_movable(name: str, plugin: str, asked: str, reward: object) -> None:
    """UserError where the entry `name` asks for `cache` or `offload`, and the reward, or its class, has none."""
    if why := kind_of(reward).fixed:
        raise UserError(f'{name}: {asked}: the reward "{plugin}" {why}; leave it out')


@dataclass(frozen=True)
class Entry:
    """What a config says of one reward. `plugin`: a name or `path/to/file.py:Class`. `column`: of its answers."""

    plugin: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    offload: Literal[False, True, "apart"] = False
    column: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What is asked to be put around the reward, innermost first: its weights come before its scores are kept."""
        asked = {"offload": self.offload, "cache": self.cache, "column": self.column}
        return {option: value for option, value in asked.items() if value is not None and value is not False}


def build_rewards(entries: Mapping[str, Entry], device: torch.device) -> dict[str, Reward]:
    """The rewards by name. Those that run on a device get `device` unless their entry names one.

    Entries with the same plugin and arguments share one reward. A key that the reward itself does not take may be an
    installed option (of the group `diffrl.reward_options`).
    Raises `UserError` as `load_reward` does, and for an entry that asks for what its reward cannot do.
    """
    made: dict[str, Reward] = {}
    rewards: dict[str, Reward] = {}
    for name, entry in entries.items():
        arguments, options = dict(entry.arguments), entry.options
        for option in by_package("reward option"):
            if option in arguments and option not in IN_CONFIGS and not takes(entry.plugin, option):
                options[option] = arguments.pop(option)
        if "device" not in arguments and takes(entry.plugin, "device"):
            arguments["device"] = str(device)
        key = json.dumps([entry.plugin, arguments], sort_keys=True, default=repr)
        if key not in made:
            made[key] = load_reward(entry.plugin, **arguments)
        reward = made[key]
        for option in MOVING:
            if option in options:
                check_movable(name, entry.plugin, option, reward)
        for option, value in options.items():
            key += json.dumps([option, value], default=repr)
            if key not in made:
                try:
                    made[key] = around(option, reward, value, entry)
                except UserError as error:
                    raise UserError(f"{name}: {error}") from error
            reward = made[key]
        if names := ability(reward, "columns"):
            text = f'the reward "{reward.name}" has the columns {", ".join(names)}'
            raise UserError(f"{name}: {text}; choose one: column")
        rewards[name] = reward
    staying = {name: reward for name, reward in rewards.items() if find_offloaded(reward) is None}
    for name, reward in rewards.items():
        if (moving := find_offloaded(reward)) is not None:
            moving.check_shared(name, staying)
    return rewards


def around(option: str, reward: Reward, value: Any, entry: Entry) -> Reward:
    """The reward with what an option, whose value is `value`, puts around it; UserError where it cannot."""
    return cast(Reward, load("reward option", option)(reward, value, entry))
