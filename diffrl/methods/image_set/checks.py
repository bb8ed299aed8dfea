"""What a config says with its image set, checked; `keys` is its section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffrl.config.base import Problem, at_key
from diffrl.config.methods import ForwardProcess
from diffrl.config.reward import read_by_steps
from diffrl.image_sets import FORM, PREFIX
from diffrl.image_sets.reading import folder_of, is_here, read_set
from diffrl.prompts import load_prompts
from diffrl.records.disk import check_writable


def contents(keys: Any, config: Any) -> dict[str, Path | str]:
    """What makes the set's rows what they are, once they have been checked."""
    _check_rows(keys, config)
    return {"image_set.source (rows)": read_set(keys.source).digest}


def check(keys: Any, config: Any) -> None:
    """Raise Problem for what a set cannot be trained on, and, where it is here, for what its rows lack."""
    if not keys.source:
        raise Problem("image_set.source", f"not given; name {FORM}")
    if not isinstance(config.objective_section, ForwardProcess):
        text = f'"{config.method.name}" trains on its own samples\' steps or rewards, which a set does not have'
        raise Problem("objective", f"{text}: use dpo, gdro, rwr, nft, crd, awm or dgpo with image_set")
    if config.rollout.scout is not None:
        raise Problem("rollout.scout", "chooses among images that are drawn, and a set's are there: leave one out")
    if abs(config.rollout.groups * keys.share - config.given_groups) > 1e-6 or not config.given_groups:
        text = f"is {config.rollout.groups * keys.share:g} of the {config.rollout.groups} prompts of an epoch"
        raise Problem("image_set.share", f"{keys.share:g} {text} (rollout.groups), no whole number")
    if keys.rival:
        _check_rival(keys, config)
    if keys.source.startswith(PREFIX) and keys.cache is None:
        text = f"not given; name a folder for the encoded pictures of {keys.source}"
        raise Problem("image_set.cache", text)
    if not at_key("image_set.source", is_here, keys.source):
        return  # it is drawn or fetched before the run, which begins by reading it; counting memory needs no set
    _check_rows(keys, config)
    cache = folder_of(keys.source) if keys.cache is None else Path(keys.cache)
    at_key("image_set.cache", check_writable, cache, "the folder of encoded pictures")


def _check_rival(keys: Any, config: Any) -> None:
    if not getattr(config.objective_section, "on_pairs", False):
        text = f'makes pairs, which are what dpo trains on, not "{config.method.name}"'
        raise Problem("image_set.rival", text)
    if keys.share != 1:
        raise Problem("image_set.share", "with image_set.rival each prompt has a picture and an image: 1")
    if (size := config.rollout.group_size) != 2:
        raise Problem("rollout.group_size", f"{size}, but a pair of image_set.rival is 2")


def _check_rows(keys: Any, config: Any) -> None:
    """Raise Problem unless the set can be read, has the scores, and no prompt that is tested on."""
    images = at_key("image_set.source", read_set, keys.source)
    needed = [*config.rewards, *read_by_steps(config.rewards, config.watch)]
    for name in needed:
        at_key("image_set.source", images.check_column, name)
    size = 1 if keys.rival else config.rollout.group_size
    count = len(keys.fitting(images, size).groups)
    if config.given_groups > count:
        text = f"{config.given_groups} prompts an epoch from {keys.source}, but {count} there have {size} pictures"
        text = text.replace("1 pictures", "a picture") if keys.rival else f"{text} (rollout.group_size)"
        raise Problem("rollout.groups", f"{text} or more")
    if not config.prompts.overlap and (shared := _shared(images, config.prompts.test)):
        text = f'{len(shared)} of its prompts are in image_set, too, such as "{shared[0][:60]}"'
        raise Problem("prompts.test", f"{text}: to allow it on purpose set prompts.overlap: true")


def _shared(images: Any, test: Any) -> list[str]:
    trained = {group.prompt for group in images.groups}
    return [prompt.text for prompt in load_prompts(test) if prompt.text in trained]
