"""Finds rewards: installed plugins (entry points of the group `diffrl.rewards`) and classes in a user's own file."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from diffrl.errors import UserError, nearest
from diffrl.resources import import_file, where
from diffrl.rewards.protocol import Reward, missing_of_class, missing_of_instance

GROUP = "diffrl.rewards"


def available() -> dict[str, EntryPoint]:
    """Installed rewards by name, sorted. Nothing is imported. Of two plugins with one name the first found counts."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return dict(sorted(found.items()))


def load_reward(name_or_path: str, **params: Any) -> Reward:
    """Builds the reward `name_or_path`: a name of `available()`, or `path/to/file.py:Class`, with its parameters.

    `d2:clip` is the reward `d2` with the parameter `reward: clip` (see `split_name`).

    Raises `UserError` for an unknown name or parameter (with the nearest valid one), a missing file, class or
    parameter, a class that does not fit the protocol (saying what is missing), and a constructor that fails.
    """
    reward_class = load_class(name_or_path)
    if (inner := split_name(name_or_path)[1]) is not None:
        params = {"reward": inner, **params}
    check_params(name_or_path, reward_class, params)
    try:
        reward = reward_class(**params)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f'reward "{name_or_path}" could not be built: {where(error)}') from error
    if missing := missing_of_instance(reward):
        raise UserError(f'"{name_or_path}" is not a reward: {"; ".join(missing)}')
    return cast(Reward, reward)


def split_name(name: str) -> tuple[str, str | None]:
    """(plugin, reward that it wraps or None): ("d2", "clip") of `d2:clip`, while `file.py:Class` has a class there."""
    outer, colon, inner = name.partition(":")
    return (outer, inner) if colon and re.fullmatch(r"[\w-]{2,}", outer) else (name, None)


def declares(name_or_path: str, ability: str) -> bool | None:
    """Whether the reward's class declares an ability such as `embeds`; None if it cannot be imported to be asked."""
    try:
        return getattr(load_class(name_or_path), ability, False) is True
    except Exception:  # what is wrong with it is said when it is built
        return None


def check_wrapped(name_or_path: str, params: Mapping[str, Any]) -> None:
    """UserError if a reward that wraps another one (its parameter `reward`) needs an ability that that one lacks."""
    outer, inner = split_name(name_or_path)
    inner = inner or params.get("reward")
    if not isinstance(inner, str):
        return
    need = getattr(load_class(outer), "needs", None)
    if need is not None and declares(inner, need) is False:
        raise UserError(f'"{outer}" corrects rewards that declare `{need}`, and "{inner}" does not')


def takes(name_or_path: str, parameter: str) -> bool:
    """Whether the reward's constructor has this parameter by name; see `load_reward` for the errors."""
    return parameter in inspect.signature(load_class(name_or_path)).parameters


def load_class(name_or_path: str) -> type:
    """The class of a reward, imported but not built; see `load_reward` for the errors."""
    name_or_path = split_name(name_or_path)[0]
    path, colon, class_name = name_or_path.rpartition(":")
    if colon and path.endswith(".py"):
        found = _class_in_file(Path(path), class_name)
    elif name_or_path.endswith(".py"):
        classes = _fitting_classes(_import_file(Path(name_or_path)))
        hint = f"{name_or_path}:{classes[0] if classes else 'ClassName'}"
        raise UserError(f'reward "{name_or_path}": name the class too, as in "{hint}"')
    else:
        found = _installed(name_or_path)
    if missing := missing_of_class(found):
        raise UserError(f'"{name_or_path}" is not a reward: {"; ".join(missing)}')
    return found


def check_params(name: str, reward_class: type, params: Mapping[str, Any]) -> None:
    """Raises `UserError` for a parameter that the constructor does not have, and for a required one that is missing."""
    accepted = _accepted(reward_class)
    others = {k for k, p in accepted.items() if p.kind is p.VAR_KEYWORD}  # **arguments: any parameter is fine
    for key in params:
        if key not in accepted and not others:
            hint = nearest(key, accepted) if accepted else " (it has no parameters)"
            raise UserError(f'reward "{name}": unknown parameter "{key}"{hint}')
    if needed := [k for k in required(reward_class) if k not in params]:
        raise UserError(f'reward "{name}": the parameter "{needed[0]}" is required')


def required(reward_class: type) -> list[str]:
    """The constructor's parameters that have no default."""
    return [k for k, p in _accepted(reward_class).items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def _accepted(reward_class: type) -> dict[str, inspect.Parameter]:
    found = inspect.signature(reward_class).parameters.items()
    return {k: p for k, p in found if p.kind is not p.VAR_POSITIONAL}


def _installed(name: str) -> type:
    plugins = available()
    if name not in plugins:
        hint = nearest(name, plugins) if plugins else " (none is installed)"
        raise UserError(f'unknown reward "{name}"{hint}; a reward of your own is written "path/to/file.py:Class"')
    try:
        return plugins[name].load()
    except Exception as error:
        raise UserError(f'reward "{name}" ({plugins[name].value}) cannot be imported: {where(error)}') from error


def _class_in_file(path: Path, class_name: str) -> type:
    module = _import_file(path)
    if not hasattr(module, class_name):
        raise UserError(f'no class "{class_name}" in {path}{nearest(class_name, _fitting_classes(module))}')
    return getattr(module, class_name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f'no reward file "{path}"{nearest(path.name, siblings)}')
    return import_file(path, "reward")


def _fitting_classes(module: ModuleType) -> list[str]:
    own = (c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__)
    return [c.__name__ for c in own if not missing_of_class(c)]
