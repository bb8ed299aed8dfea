"""Finds rewards: installed plugins (entry points of the group `diffrl.rewards`) and classes in a user's own file."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from diffrl.errors import UserError, in_one_line, nearest
from diffrl.resources import hub_failure, import_file, where
from diffrl.rewards import local
from diffrl.rewards.protocol import Reward, ability, missing_of_class, missing_of_instance
from diffrl.rewards.secrets import check_no_credentials

GROUP = "diffrl.rewards"


def available() -> dict[str, EntryPoint]:
    """Installed rewards by name, sorted. Nothing is imported.

    Where two packages have a reward of one name, neither has it: they are called `package:name`.
    """
    rewards: dict[str, EntryPoint] = {}
    for name, owners in _by_name().items():
        for package, entry in owners.items():
            rewards[name if len(owners) == 1 else f"{package}:{name}"] = entry
    return dict(sorted(rewards.items()))


def _by_name() -> Mapping[str, Mapping[str, EntryPoint]]:
    """{name: {package: its entry}} of everything that is installed."""
    folders = tuple((folder, os.stat(folder).st_mtime_ns) for folder in sys.path if os.path.isdir(folder))
    return _scan(entry_points, folders)


@functools.lru_cache(maxsize=4)
def _scan(
    find: Callable[..., EntryPoints], folders: tuple[tuple[str, int], ...]
) -> Mapping[str, Mapping[str, EntryPoint]]:
    """What `find` finds in `folders` (with the time of their last change: a package may be installed meanwhile).

    Kept, because it reads the metadata of every package anew, and a config asks for each of its rewards.
    """
    groups: dict[str, dict[str, EntryPoint]] = {}
    for entry in find(group=GROUP):
        package = entry.dist.name if entry.dist is not None else "?"
        # One package that is found twice (a checkout beside its installation) is one: the first on the path counts.
        groups.setdefault(entry.name, {}).setdefault(package, entry)
    return groups


def _find(name: str) -> EntryPoint | None:
    """The entry of `name` or `package:name`; None if there is none, or several of that name."""
    package, colon, plain = name.rpartition(":")
    owners = _by_name().get(plain, {})
    if colon:
        return owners.get(package)
    return available().get(name)


def exists(name: str) -> bool:
    """Is there one installed reward of this name, or `package:name`?"""
    return name in available() or (":" in name and _find(name) is not None)


def unknown(name: str) -> str:
    """What to say of a name that no installed reward has, or that two packages have."""
    owners = _by_name().get(name, {})
    if len(owners) > 1:
        choices = " or ".join(f'"{package}:{name}"' for package in sorted(owners))
        return f'reward "{name}" is in {len(owners)} packages, {" and ".join(sorted(owners))}: write {choices}'
    plugins = available()
    hint = nearest(name, plugins) if plugins else " (none is installed)"
    return f'unknown reward "{name}"{hint}'


def load_reward(name_or_path: str, **params: Any) -> Reward:
    """Builds the reward `name_or_path`: a name of `available()`, or `path/to/file.py:Class`, with its parameters.

    `d2:clip` is the reward `d2` with the parameter `reward: clip` (see `split_name`).

    Raises `UserError` for an unknown name or parameter (with the nearest valid one), a missing file, class or
    parameter, a class that does not fit the protocol (saying what is missing), and a constructor that fails.
    """
    reward_class = load_class(name_or_path)
    if local.is_local(name_or_path) and not inspect.isclass(thing := local.find(name_or_path)):
        if params:
            raise UserError(f'reward "{name_or_path}" is built already; it takes no parameter "{next(iter(params))}"')
        if missing := missing_of_instance(thing):
            raise UserError(f'"{name_or_path}" is not a reward: {"; ".join(missing)}')
        return cast(Reward, thing)
    if (inner := split_name(name_or_path)[1]) is not None:
        params = {"reward": inner, **params}
    check_params(name_or_path, reward_class, params)
    failure = hub_failure() if getattr(getattr(reward_class, "card", None), "repository", None) else ""
    try:
        reward = reward_class(**params)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        hint = f"; {failure}" if failure else ""
        raise UserError(f'reward "{name_or_path}" could not be built: {where(error)}{hint}') from error
    if missing := missing_of_instance(reward):
        raise UserError(f'"{name_or_path}" is not a reward: {"; ".join(missing)}')
    return cast(Reward, reward)


def split_name(name: str) -> tuple[str, str | None]:
    """(plugin, reward that it wraps or None): ("d2", "clip") of `d2:clip`, while `file.py:Class` has a class there."""
    package, colon, rest = name.partition(":")
    if colon and package in _packages() and package not in available():  # diffrl:clip, diffrl:d2:clip
        outer, colon, inner = rest.partition(":")
        return f"{package}:{outer}", inner if colon else None
    outer, colon, inner = name.partition(":")
    if local.is_local(name):
        return name, None
    return (outer, inner) if colon and re.fullmatch(r"[\w-]{2,}", outer) else (name, None)


def _packages() -> set[str]:
    """The packages that have rewards."""
    return {package for owners in _by_name().values() for package in owners}


def declares(name_or_path: str, ability: str) -> bool | None:
    """Whether the reward's class declares an ability such as `embeds`; None if it cannot be imported to be asked."""
    return _of_class(name_or_path, lambda subject: getattr(subject, ability, False) is True)


def has_method(name_or_path: str, method: str) -> bool | None:
    """Whether the reward's class has this method; None if it cannot be imported to be asked."""
    return _of_class(name_or_path, lambda subject: callable(getattr(subject, method, None)))


def _of_class(name_or_path: str, ask: Callable[[object], bool]) -> bool | None:
    try:
        return ask(local.find(name_or_path) if local.is_local(name_or_path) else load_class(name_or_path))
    except Exception:  # what is wrong with it is said when it is built
        return None


def declared_range(name_or_path: str) -> tuple[float, float]:
    """Lowest and highest score by the class's card; without a card, or a class to ask, unbounded."""
    try:
        card = getattr(load_class(name_or_path), "card", None)
    except Exception:  # what is wrong with it is said when it is built
        card = None
    return getattr(card, "range", (-math.inf, math.inf))


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
    if local.is_local(name_or_path) and not inspect.isclass(local.find(name_or_path)):
        return False
    return parameter in inspect.signature(load_class(name_or_path)).parameters


def footprint(name_or_path: str, arguments: Mapping[str, Any]) -> int | None:
    """Bytes of the weights that the reward has on its device, built with these arguments; None: it does not say.

    Raises UserError for an unknown name, and for what the reward's own `footprint` refuses or fails with.
    """
    reward, inner = load_class(name_or_path), split_name(name_or_path)[1]
    estimate = ability(reward, "footprint")
    if estimate is None:
        return None
    parameters = inspect.signature(reward).parameters.items()
    defaults = {name: one.default for name, one in parameters if one.default is not inspect.Parameter.empty}
    wrapped = {} if inner is None else {"reward": inner}
    try:
        size = estimate(**defaults | wrapped | dict(arguments))
        return None if size is None else int(size)
    except UserError:
        raise
    except Exception as error:  # a plugin's own code
        raise UserError(f"footprint() of {reward.__name__} failed with {in_one_line(error)}") from error


def load_class(name_or_path: str) -> type:
    """The class of a reward, imported but not built; see `load_reward` for the errors."""
    name_or_path = split_name(name_or_path)[0]
    path, colon, class_name = name_or_path.rpartition(":")
    if local.is_local(name_or_path):
        thing = local.find(name_or_path)
        loaded = thing if inspect.isclass(thing) else type(thing)
    elif colon and path.endswith(".py"):
        loaded = _class_in_file(Path(path), class_name)
    elif name_or_path.endswith(".py"):
        classes = _fitting_classes(_import_file(Path(name_or_path)))
        hint = f"{name_or_path}:{classes[0] if classes else 'ClassName'}"
        raise UserError(f'reward "{name_or_path}": name the class too, as in "{hint}"')
    else:
        loaded = _installed(name_or_path)
    if missing := missing_of_class(loaded):
        raise UserError(f'"{name_or_path}" is not a reward: {"; ".join(missing)}')
    return loaded


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


def _installed(name: str) -> type:
    entry = _find(name)
    if entry is None:
        raise UserError(f'{unknown(name)}; a reward of your own is written "path/to/file.py:Class"')
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise UserError(f'reward "{name}" ({entry.value}) cannot be imported: {where(error)}') from error


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
    classes = (c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__)
    return [c.__name__ for c in classes if not missing_of_class(c)]
