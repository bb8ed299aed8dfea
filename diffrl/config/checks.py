"""Whether a config's values work together, and whether what they name is there. An error is a `Problem` at a key."""

from __future__ import annotations

import os
import re
from pathlib import Path

from diffrl.config.base import Problem, at_key
from diffrl.config.reward import Reward, Watched
from diffrl.config.schema import INSIDE, Config, is_on, ordered
from diffrl.errors import UserError, nearest
from diffrl.plugins import here, installed, load
from diffrl.prompts import Source, check_source, load_prompts, split_groups, world_of_set
from diffrl.worlds import form_of, worlds

# Folders of the operating system: with all that is below them, and by themselves.
SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys")
SHARED = ("home", "media", "mnt", "opt", "root", "run", "srv", "tmp", "usr", "var")


def check(config: Config, world: int | None = None) -> None:
    """Raise Problem for the first thing that cannot work; `world`: number of processes (default: WORLD_SIZE, or 1)."""
    from diffrl.rewards.credentials import check_no_credentials

    at_key("model", check_model, config.model)
    for table in ("rewards", "watch"):
        for name, reward in getattr(config, table).items():
            for argument, value in reward.arguments.items():  # the config is written into the run's folder
                at_key(f"{table}.{name}.{argument}", check_no_credentials, value, argument)
    check_unused(config)
    check_run_dir(config.run_dir)
    check_prompts(config)
    check_rewards(config)
    for name in ordered(config):
        if is_on(config, name) and hasattr(section := getattr(config, name), "check"):
            section.check(config)
    for name in installed("check"):
        load("check", name)(config)
    check_geometry(config, world_size() if world is None else world)


def check_unused(config: Config) -> None:
    """No section of an objective that is not chosen: what it says would have no effect, unnoticed."""
    for name in ordered(config):
        if name not in INSIDE and not is_on(config, name):
            text = f'the objective is "{config.objective}", which does not use this section; set objective: {name}'
            raise Problem(name, f"{text}, or leave it out")


def check_run_dir(run_dir: str) -> None:
    """A folder of the run's own: not a file, not one that holds the system, the home or the current folder."""
    path = Path(run_dir)
    try:
        file = next((one for one in (path, *path.parents) if one.is_file()), None)
        place = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long for a name, links in a circle, or a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise Problem("run_dir", f"not a folder's name: {reason}") from error
    if file is not None:
        raise Problem("run_dir", f'"{file}" is a file; name a folder')
    _, *parts = place.parts
    above = any(place == safe or place in safe.parents for safe in (Path.home().resolve(), Path.cwd().resolve()))
    below = parts[0] in SYSTEM and not (parts[:2] == ["dev", "shm"] and len(parts) > 2) if parts else True
    if above or below or (len(parts) == 1 and parts[0] in SHARED):
        raise Problem("run_dir", f'"{run_dir}" holds more than a run; name a folder of its own, such as runs/NAME')


def world_size() -> int:
    """Number of processes, from the launcher's WORLD_SIZE."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise UserError(f'environment: WORLD_SIZE: expected the number of processes, got "{text}"')
    return int(text)


def check_model(model: str) -> None:
    """Raise UserError if `model` looks like a folder and is none in diffusers' format. Hub ids are left to the hub."""
    from diffrl.hub import not_name

    if (form := form_of(model)) is not None:
        if not form.base:
            return
        model = form.base
    path = Path(here(model))
    if model in worlds():
        return
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            run = "; it is a run, whose LoRA --lora and lora.start take" if (path / "metrics.jsonl").is_file() else ""
            raise UserError(
                f'"{model}" is a folder without model_index.json, so not a model in diffusers\' format{run}'
            )
        return
    if not not_name(model, "OWNER/NAME[@REVISION]") and not path.parent.is_dir():
        return
    if len(path.parts) > 1:
        folders = [folder.name for folder in path.parent.iterdir() if folder.is_dir()] if path.parent.is_dir() else []
        raise UserError(f'no folder "{model}"{nearest(path.name, folders)}')
    text = (
        f'"{model}" is neither "playground", a folder here, nor a hub id like stabilityai/stable-diffusion-3.5-medium'
    )
    models = [index.parent.name for index in path.parent.glob("*/model_index.json")]
    raise UserError(text + nearest(model, [*worlds(), *models]))


def check_prompts(config: Config) -> None:
    """Both sources can be read, and there are enough different prompts for an epoch."""
    prompts = config.prompts
    given = prompts.model_fields_set
    for name, other in (("train", "test"), ("test", "train")):
        if other in given and name not in given and (name == "test" or config.drawn_groups):
            raise Problem(f"prompts.{name}", f"not given, but prompts.{other} is; give both")
    for source in [prompts.test] if isinstance(prompts.test, str) else prompts.test:
        at_key("prompts.test", check_source, source)
    if not config.drawn_groups:
        return
    for source, groups in at_key("prompts.train", split_groups, prompts.train, config.drawn_groups).items():
        count = at_key("prompts.train", check_source, source)
        if count is not None and groups > count:
            owner = "prompts.train" if source == prompts.train else source
            todo = f"set rollout.groups to {count} or less" if source == prompts.train else "lower rollout.groups"
            text = f"{groups} different prompts an epoch, but {owner} has only {count}: {todo}"
            raise Problem("rollout.groups", f"{text}, and optimise.batch_size to divide groups x group_size")
    if not prompts.overlap and (shared := overlap(prompts.train, prompts.test)):
        example = f'{len(shared)} of its prompts are in prompts.train, too, such as "{shared[0][:60]}"'
        text = "training prompts cannot be held out; to allow it, set prompts.overlap: true"
        raise Problem("prompts.test", f"{example}: {text}")


def overlap(train: Source, test: Source) -> list[str]:
    """The test prompts that are also trained on. Splits of a world share none by construction."""
    sides = [[side] if isinstance(side, str) else list(side) for side in (train, test)]
    worlds_of = [[(name, world_of_set(name)) for name in side] for side in sides]
    splits = [{world and (world.name, world.split(name)) for name, world in side} for side in worlds_of]
    if None not in splits[0] | splits[1] and not splits[0] & splits[1]:
        return []
    first = {prompt.text for source in sides[0] for prompt in load_prompts(source)}
    return [prompt.text for source in sides[1] for prompt in load_prompts(source) if prompt.text in first]


def check_rewards(config: Config) -> None:
    """There are rewards, each is known, and none is both optimised and watched."""
    if not config.rewards:
        from diffrl.rewards.registry import available

        raise Problem("rewards", f"empty; name at least one (there are: {', '.join(sorted(available()))})")
    for name in config.rewards:
        if name in config.watch:
            raise Problem(f"watch.{name}", f"{name} is also in rewards; take it out of one (watch.{name}=null)")
        if config.rewards[name].weight == 0:
            raise Problem(f"rewards.{name}.weight", f"0 optimises nothing; move {name} to watch")
    for table in ("rewards", "watch"):
        for name, reward in getattr(config, table).items():
            _check_reward(f"{table}.{name}", name, reward)
    if any(_is_more_than_scores(name, entry) for name, entry in {**config.watch, **config.rewards}.items()):
        from diffrl.config.reward_checks import check_together

        check_together(config)
    if config.method.decodes:
        for name, reward in config.rewards.items():
            why = f'objective "{config.method.name}" back-propagates through the reward itself'
            _check_plain(f"rewards.{name}", reward, why)
    for method in config.methods:
        for name, (why, options) in getattr(config, method.name).plain(config).items():
            if name in config.rewards:
                _check_plain(f"rewards.{name}", config.rewards[name], why, options)


def _is_more_than_scores(name: str, entry: Watched) -> bool:
    """Does it say more of an image than one score, which is optimised as it is?"""
    from diffrl.rewards.registry import declares

    more = any(declares(entry.plugin or name, ability) for ability in ("asks", "batchwise"))
    return more or bool(entry.shape.steps()) or getattr(entry, "spatial", False)


def _check_reward(key: str, name: str, reward: Watched) -> None:
    from diffrl.rewards.registry import check_wrapped

    if not re.fullmatch(r"[\w-]+", name):
        raise Problem(key, f'a reward\'s name has letters, digits, "_" and "-" only, got "{name}"')
    at_key(key if reward.plugin is None else f"{key}.plugin", check_plugin, reward.plugin or name)
    at_key(key, check_wrapped, reward.plugin or name, reward.arguments)


def _check_plain(
    key: str, reward: Reward, why: str, options: tuple[str, ...] = ("shape", "cache", "offload", "column")
) -> None:
    """Raise Problem for an option that changes how a reward is called, where the plain one is needed."""
    for option in options:
        if reward.shape.steps() if option == "shape" else getattr(reward, option):
            raise Problem(f"{key}.{option}", f"{why}; leave {option} out")


def check_plugin(plugin: str) -> None:
    """Raise UserError unless this is an installed reward, `module:NAME`, or a `path/to/file.py:NAME` that is there."""
    from diffrl.plugins import find, unknown
    from diffrl.rewards import local
    from diffrl.rewards.registry import is_module, split_name

    if local.is_local(plugin):
        local.find(plugin)
        return
    outer, inner = split_name(plugin)
    if inner is not None:  # d2:clip
        check_plugin(outer)
        if outer != "remote":  # what a server has need not be installed here
            check_plugin(inner)
        return
    if is_module(plugin) or find("reward", plugin) is not None:  # "diffrl:clip", too, where a folder is called diffrl
        return
    if ".py" in plugin or "/" in plugin or Path(plugin.partition(":")[0]).is_dir():
        path, _, name = plugin.rpartition(":")
        if not path.endswith(".py") or not name.isidentifier():
            raise UserError(f'"{plugin}": write path/to/file.py:Class, or install its package')
        if not Path(path).is_file():
            folder = Path(path).parent
            files = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
            raise UserError(f'no file "{path}"{nearest(Path(path).name, files)}')
        from diffrl.config.in_file import check_names_in_file

        check_names_in_file(path, name)
        return
    raise UserError(unknown("reward", plugin))


def check_geometry(config: Config, world: int) -> None:
    """Images, optimiser steps, processes and micro-batches divide one another; nothing is rounded silently."""
    rollout, optimise = config.rollout, config.optimise
    factors = f"rollout.groups {rollout.groups} x rollout.group_size {rollout.group_size}"
    images = f"{rollout.images} images of an epoch ({factors})"
    batch = optimise.batch_size
    if rollout.images % batch:
        raise Problem("optimise.batch_size", f"{batch} images per optimiser step do not divide the {images}")
    if rollout.images % world:
        raise Problem("rollout.groups", f"{world} processes do not divide the {images}")
    if rollout.scout is not None and rollout.candidates % world:
        text = f"{world} processes do not divide the {rollout.groups} x {rollout.scout.images} candidates of an epoch"
        raise Problem("rollout.scout.images", text)
    if batch % world:
        raise Problem("optimise.batch_size", f"{world} processes do not divide the {batch} images of an optimiser step")
    for section in config.sections:
        section.check_world(config, world)
    if getattr(config.objective_section, "whole_groups", False):
        check_whole_groups(config, world)


def check_whole_groups(config: Config, world: int) -> None:
    """An optimiser step holds whole groups; with several steps an epoch, each process has as many of each step."""
    rollout, batch, group = config.rollout, config.optimise.batch_size, config.rollout.group_size
    steps = rollout.images // batch
    if batch % group:
        sizes = [n * group for n in range(1, rollout.groups + 1) if rollout.groups % n == 0]
        near = min(sizes, key=lambda size: abs(size - batch))
        text = f'{batch} images per optimiser step split groups of {group} (rollout.group_size), which "'
        raise Problem("optimise.batch_size", f'{text}{config.method.name}" keeps whole (nearest: {near})')
    if steps > 1 and rollout.groups % (steps * world):
        share = f"{rollout.groups} groups do not divide over {world} processes and {steps} optimiser steps an epoch"
        text = f'{share}, and "{config.method.name}" keeps groups whole'
        hint = f"a multiple of {steps * world}, or one step an epoch (optimise.batch_size={rollout.images})"
        raise Problem("rollout.groups", f"{text}: use {hint}")
