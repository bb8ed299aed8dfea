"""Rewards by their names: installed plugins, classes in a user's own file, and objects of the program."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

from diffrl.errors import UserError, in_one_line, nearest
from diffrl.plugins import LOADING, by_package, find, here, installed, is_path, load, load_value
from diffrl.rewards import local
from diffrl.rewards.credentials import check_no_credentials
from diffrl.rewards.protocol import Reward, missing_of_class, missing_of_instance


def available() -> Mapping[str, EntryPoint]:
    """Installed rewards by name, sorted (`diffrl.plugins.installed`). Nothing is imported."""
    return installed("reward")


def load_reward(name_or_path: str, **params: Any) -> Reward:
    """Builds the reward `name_or_path`: a name of `available()`, or `path/to/file.py:Class`, with its parameters.

    `d2:clip` is the reward `d2` with the parameter `reward: clip` (see `split_name`).

    Raises `UserError` for an unknown name or parameter (with the nearest valid one), a missing file, class or
    parameter, a class that does not fit the protocol (saying what is missing), and a constructor that fails.
    """
    reward_class = load_class(name_or_path)
    if not inspect.isclass(thing := found(name_or_path)):
        if params:
            raise UserError(f'reward "{name_or_path}" is built already; it takes no parameter "{next(iter(params))}"')
        return _whole(name_or_path, thing)
    if (inner := split_name(name_or_path)[1]) is not None:
        params = {"reward": inner, **params}
    check_params(name_or_path, reward_class, params)
    from diffrl.hub import recorded
    from diffrl.process_state import unchanged
    from diffrl.switches import leave_cudnn_attention

    leave_cudnn_attention()
    failure = ""
    if getattr(getattr(reward_class, "card", None), "repository", None):
        from diffrl.hub_access import hub_failure

        failure = hub_failure()
    warn = partial(logging.getLogger("diffrl").warning, 'reward "%s" %s', name_or_path)
    try:
        with LOADING, recorded() as commits, unchanged(warn):
            reward = reward_class(**{key: here(value) for key, value in params.items()})
        with contextlib.suppress(AttributeError, TypeError):  # of one with slots
            reward.commits = commits
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        why = in_one_line(error, place=True) + (f"; {failure}" if failure else "")
        raise UserError(f'reward "{name_or_path}" could not be built: {why}') from error
    return _whole(name_or_path, reward)


def _whole(name: str, reward: object) -> Reward:
    if missing := missing_of_instance(reward):
        raise UserError(f'"{name}" is not a reward: {"; ".join(missing)}')
    return cast(Reward, reward)


def split_name(name: str) -> tuple[str, str | None]:
    """(plugin, reward that it wraps or None): ("d2", "clip") of `d2:clip`, while `file.py:Class` has a class there."""
    package, colon, rest = name.partition(":")
    if colon and package in _packages() and package not in available():  # diffrl:clip, diffrl:d2:clip
        outer, colon, inner = rest.partition(":")
        return f"{package}:{outer}", inner if colon else None
    outer, colon, inner = name.partition(":")
    if local.is_local(name) or is_module(name):
        return name, None
    return (outer, inner) if colon and re.fullmatch(r"[\w-]{2,}", outer) else (name, None)


def is_module(name: str) -> bool:
    """Whether a plugin's name is `module:NAME` of a module that can be imported, from the current folder too."""
    module, _, thing = name.partition(":")
    if is_path(name) or not thing.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return False
    if find("reward", module) is not None or find("reward", name) is not None or module in _packages():
        return False
    if os.getcwd() not in sys.path and Path(*module.split(".")).with_suffix(".py").is_file():
        sys.path.append(os.getcwd())
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except Exception:  # finding a.b imports a
        return False


def _packages() -> set[str]:
    """The packages that have rewards."""
    return {package for packages in by_package("reward").values() for package in packages}


def declares(name_or_path: str, ability: str) -> bool | None:
    """Whether the reward's class declares an ability such as `embeds`, or has a method of this name; None if it cannot
    be imported to be asked."""
    try:
        value = getattr(found(name_or_path), ability, False)
    except Exception:  # what is wrong with it is said when it is built
        return None
    return value is True or callable(value)


def found(name_or_path: str) -> object:
    """The reward's class, or what this program has given under its name. UserError if there is none."""
    return local.find(name_or_path) if local.is_local(name_or_path) else load_class(name_or_path)


def declared_range(name_or_path: str) -> tuple[float, float]:
    """Lowest and highest score by the class's card; without a card, or a class to ask, unbounded."""
    with contextlib.suppress(Exception):
        return found(name_or_path).card.range  # type: ignore[attr-defined,no-any-return]
    return -math.inf, math.inf


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
    thing = found(name_or_path)
    return inspect.isclass(thing) and parameter in inspect.signature(thing).parameters


def load_class(name_or_path: str) -> type:
    """The class of a reward, imported but not built; see `load_reward` for the errors."""
    name_or_path = split_name(name_or_path)[0]
    if local.is_local(name_or_path):
        thing = local.find(name_or_path)
        loaded = thing if inspect.isclass(thing) else type(thing)
    else:
        loaded = local.given(name_or_path)  # this program has it already, and need not import its own file
        if loaded is None:
            module = is_module(name_or_path)
            loaded = load_value("reward", *[name_or_path] * 2) if module else load("reward", name_or_path, fits=_fits)
            if ":" in name_or_path:
                loaded = adapted(loaded, name_or_path.rpartition(":")[2])
    if missing := missing_of_class(loaded):
        raise UserError(f'"{name_or_path}" is not a reward: {"; ".join(missing)}')
    return loaded


def adapted(thing: Any, name: str) -> Any:
    """What a person wrote as a reward called NAME, as a class with the protocol, where a form of `diffrl.reward_forms`
    knows it (functions, say); UserError for what cannot be a reward."""
    for form in installed("reward form"):
        thing = load("reward form", form)(thing, name)
    return thing


def check_params(name: str, reward_class: type, params: Mapping[str, Any]) -> None:
    """Raises `UserError` for a parameter that the constructor does not have, and for a required one that is missing."""
    check_no_credentials(params, f'reward "{name}"')
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
    parameters = inspect.signature(reward_class).parameters.items()
    return {k: p for k, p in parameters if p.kind is not p.VAR_POSITIONAL}


def _fits(thing: object) -> bool:
    return inspect.isfunction(thing) or (inspect.isclass(thing) and not missing_of_class(thing))
