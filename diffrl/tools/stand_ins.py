"""What belongs to a world alone: rewards, prompts and features that stand in for real ones on its own small model.

They are defaults, so that the playground runs without a download. A model that draws something else would be trained
on noise by them, without a word; so the code that knows the model asks here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffrl.errors import UserError
from diffrl.keys import Problem, at_key
from diffrl.prompts import world_of_set
from diffrl.rewards import local
from diffrl.rewards.registry import available, load_class, split_name
from diffrl.worlds import owner, worlds

PROMPTS = "a file with one prompt on each line, or a set of `diffrl prompts list`"


@dataclass(frozen=True)
class StandIn:
    """A reward that is a world's own where one of its parameters `keys` is left out; without keys, always.

    instead: what to give for another model, in words. arguments: the same as parameters, where these are enough.
    """

    instead: str
    keys: Sequence[str] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


def check_reward(model: str, plugin: str, arguments: Mapping[str, Any]) -> None:
    """UserError if a reward, as it is given, is another world's stand-in; in one line, with the real choice."""
    if local.is_local(plugin) or plugin.partition(":")[0] == "remote":  # a server has weights of its own
        return
    name, inner = split_name({entry.value: one for one, entry in available().items()}.get(plugin, plugin))
    mine = owner(model)
    for world in worlds().values():
        stand_in = None if world is mine else world.stand_ins.get(name.rpartition(":")[2])
        missing = None if stand_in is None else next((key for key in stand_in.keys if arguments.get(key) is None), None)
        if stand_in is not None and (missing is not None or not stand_in.keys):
            what = f'"{name}" without `{missing}`' if missing else f'the reward "{name}"'
            text = f'{what} is {world.name}\'s own and means nothing for the model "{model}"'
            raise UserError(f"{text}; give {stand_in.instead}")
    made_of = inner or arguments.get("reward") or Path(str(arguments.get("head"))).is_file()  # else no class is loaded
    if made_of and (wrapped := _wrapped(load_class(name), inner, arguments)) is not None:
        check_reward(model, *wrapped)


def _wrapped(reward: Any, inner: str | None, arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The reward that another one is made of (d2, reform, fitted), and its parameters."""
    if hasattr(reward, "wrapped"):
        return reward.wrapped(**arguments)  # type: ignore[no-any-return]
    parameter = inspect.signature(reward).parameters.get("reward")
    name = inner or arguments.get("reward") or getattr(parameter, "default", None)
    if parameter is None or not isinstance(name, str):
        return None
    return name, {key: value for key, value in arguments.items() if key != "reward"}


def check_set(model: str, source: str) -> None:
    """UserError if a prompt set is in the language of a world, and the model is not that world's."""
    if (world := world_of_set(source)) is not None and world is not owner(model):
        text = f'"{source}" is in the language of {world.name}, and the model is "{model}"'
        raise UserError(f"{text}; give {PROMPTS}")


def check_config(config: Any) -> None:
    """Problem at the first key of a config that means a world's stand-in, for a model of another kind."""
    for table in ("rewards", "watch"):
        for name, entry in getattr(config, table).items():
            at_key(f"{table}.{name}", check_reward, config.model, entry.plugin or name, entry.arguments)
    for key in ("train", "test"):
        sources = getattr(config.prompts, key)
        if key == "test" or config.drawn_groups:
            for source in [sources] if isinstance(sources, str) else sources:
                at_key(f"prompts.{key}", check_set, config.model, source)
    features, mine = config.evaluate.features, owner(config.model)
    for world in worlds().values():
        if world is not mine and features == world.features != "pixels":
            text = f'"{features}" is {world.name}\'s, and the model is "{config.model}"'
            raise Problem("evaluate.features", f"{text}; give pixels, or a vision model such as facebook/dinov2-base")
