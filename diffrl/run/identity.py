"""What the names in a config stand for, as digests: prompts' texts, the model's files, teachers' LoRAs, code of rewards
and of an objective or an advantage rule from outside."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffrl.config import Config
from diffrl.config.base import Section
from diffrl.config.reward import read_on_training_images
from diffrl.plugins import load
from diffrl.policy import find_model
from diffrl.prompts import load_prompts
from diffrl.records.identity import FREE_OF_REWARDS, VERSION, Identity, flat, within
from diffrl.rewards.protocol import Reward, ability
from diffrl.rewards.registry import split_name
from diffrl.version import __version__


def contents(config: Config) -> Identity:
    """What the config names and needs no reward built."""
    from diffrl.files import sha256
    from diffrl.rewards.identity import stamp

    # An epoch's prompts are a function of seed, epoch and this list, so a resume must find the same list.
    identity: Identity = {}
    if config.drawn_groups:
        prompts = [[prompt.text, dict(prompt.metadata)] for prompt in load_prompts(config.prompts.train)]
        identity["prompts.train (texts)"] = digest(prompts)
    source, index = find_model(config.model)
    if Path(source).is_dir():
        identity["model (files)"] = digest(stamp(source))
    if "_form" in index:
        identity["model (one file)"] = digest(stamp(str(index["_form"].file)))
    identity |= _commits({"model": source, "evaluate.features": config.evaluate.features})
    for section in (getattr(config, name) for name in type(config).model_fields):
        other = isinstance(section, Section) and section.method is not None and section.method.kind == "objective"
        if isinstance(section, Section) and (section is config.objective_section or not other):
            for key, found in section.contents(config).items():
                identity[key] = sha256(found)[:16] if isinstance(found, Path) else found
    if not config.method.trainer:
        identity["objective (code)"] = digest_of_code(load("objective", config.objective))
    return identity


def digest_of_code(thing: Any) -> str:
    """Of the file that a class or function of a package or a user is in."""
    code = inspect.getsourcefile(thing)
    return digest(Path(code).read_text(encoding="utf-8")) if code else ""


def digests(config: Config, rewards: Mapping[str, Reward]) -> Identity:
    """Code and files of all rewards of the config, trained and watched, as they were built."""
    from diffrl.rewards.identity import identity_of

    result: Identity = {}
    for table in ("rewards", "watch"):
        for name, entry in getattr(config, table).items():
            identity = identity_of(entry.plugin or name, entry.arguments, rewards[name])
            for repository, commit in (ability(rewards[name], "commits") or {}).items():
                result[f"{table}.{name} (commit of {repository})"] = commit
            result[f"{table}.{name} (code and files)"] = identity[:16]
    return result


def of_training(config: Config, code: Identity) -> Identity:
    """Of `digests` those of the rewards that training reads."""
    read = tuple(f"watch.{name} " for name in read_on_training_images(config))
    return {key: value for key, value in code.items() if key.startswith(("rewards.", *read))}


def started_with(config: Config) -> Identity:
    """What all processes have to be started with: every key of the config but how its rewards are called."""
    values = flat(config.resolved())
    called = {
        key
        for key in values
        if key.startswith(("rewards.", "watch.")) and within(key.split(".", 2)[-1], FREE_OF_REWARDS)
    }
    settings = {key: value for key, value in values.items() if key not in called}
    also = {f"evaluate.also.{name}": one.source(config.model) for name, one in config.evaluate.also.items()}
    settings["prompts.test (texts)"] = digest(load_prompts(config.prompts.test))  # each process draws a share
    return {VERSION: __version__, **settings} | contents(config) | _commits(also) | _plugin_files(config)


def _commits(names: Mapping[str, str]) -> Identity:
    """The commits of these names of the hub, as far as they are known."""
    from diffrl.hub import pinned

    found = {key: pinned(name) for key, name in names.items() if "/" in name}
    return {f"{key} (commit of {source})": at["revision"] for key, (source, at) in found.items() if at}


def _plugin_files(config: Config) -> Identity:
    """The code of plugins that are files, wrapped ones (d2:file.py:Class, or d2 with `reward: file.py:Class`) too: the
    same path may lead to another file on another machine."""
    named: dict[str, list[Any]] = {"family": [config.family]}
    for table in ("rewards", "watch"):
        for name, entry in getattr(config, table).items():
            named[f"{table}.{name}"] = [entry.plugin or name, *entry.arguments.values()]
    files: Identity = {}
    for key, values in named.items():
        for text in (value for value in values if isinstance(value, str)):
            while (inner := split_name(text)[1]) is not None:
                text = inner
            file = Path(text.rpartition(":")[0])
            if file.suffix == ".py" and file.is_file():
                files[f"{key} (file)"] = digest(file.read_text(encoding="utf-8", errors="replace"))
    return files


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
