"""Whether a config's rewards go with one another and with the rest of it: those that people answer, that judge whole
batches, that have maps, or whose scores go through steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffrl.config.base import Problem
from diffrl.config.reward import Reward, Shape, Watched, read_by_steps, read_on_training_images, spatial
from diffrl.errors import nearest
from diffrl.rewards.order import in_order


def check_together(config: Any) -> None:
    """Raise Problem for the first reward that does not go with the others, or with a section of the config."""
    check_shapes(config.rewards, config.watch)
    check_asking(config.rewards, config.watch, config)
    check_batchwise(config.rewards, config.watch, config)
    check_spatial(config.rewards, config)


def check_asking(rewards: Mapping[str, Reward], watch: Mapping[str, Watched], config: Any) -> None:
    """Raise Problem where people would not be asked, or about images that are no final ones."""
    from diffrl.rewards.registry import declares

    for name, entry in watch.items():
        if declares(entry.plugin or name, "asks"):
            raise Problem(f"watch.{name}", "people are asked about training images alone; put it under rewards")
    asking = [name for name, entry in rewards.items() if declares(entry.plugin or name, "asks")]
    if not asking:
        return
    where = f"rewards.{asking[0]}"
    if (credit := next((method for method in config.methods if method.kind == "credit"), None)) is not None:
        raise Problem(where, f"people judge final images, and {credit.name} scores others, too; leave one out")
    if config.rollout.scout is not None:
        raise Problem(where, "people are not asked about scouts; leave out rollout.scout")
    if config.drawn_groups == 0:
        raise Problem(where, "an image set's pictures are not voted on; leave out image_set")
    if (size := config.rollout.group_size) < 2:
        raise Problem(where, f"people compare the images of a group, and rollout.group_size is {size}")


def check_batchwise(rewards: Mapping[str, Reward], watch: Mapping[str, Watched], config: Any) -> None:
    """Raise Problem where a reward of the whole batch would see other images than an epoch's final ones."""
    from diffrl.rewards.registry import declares

    entries = {
        **{f"watch.{n}": watch[n] for n in read_on_training_images(config) if n in watch},
        **{f"rewards.{n}": r for n, r in rewards.items()},
    }
    where = next((w for w, e in entries.items() if declares(e.plugin or w.partition(".")[2], "batchwise")), None)
    if where is None:
        return
    if (credit := next((method for method in config.methods if method.kind == "credit"), None)) is not None:
        text = f"it judges an epoch's final images together, and {credit.name} scores others, too; leave one out"
        raise Problem(where, text)
    if config.rollout.scout is not None:
        raise Problem(
            where, "it judges an epoch's images together, and scouts are judged before; leave out rollout.scout"
        )
    if config.image_set is not None:
        raise Problem(
            where, "it judges the images that a run draws; an image set brings its scores: leave out image_set"
        )


def check_spatial(rewards: Mapping[str, Reward], config: Any) -> None:
    """Raise Problem where a reward's map cannot be had, or could not weigh latent cells."""
    from diffrl.rewards.registry import declares

    for name in spatial(rewards):
        entry = rewards[name]
        where, method = f"rewards.{name}.spatial", config.method
        if declares(entry.plugin or name, "map") is False:
            raise Problem(
                where, f'"{entry.plugin or name}" has no map (`maps`), one score an image alone: leave it out'
            )
        if not method.spatial or not getattr(config.objective_section, "by_cells", True):
            text = f'objective "{method.name}" does not weigh an image\'s latent cells one by one'
            raise Problem(where, f"{text}; nft does, and rwr with rwr.weights: linear")
        held = [one for one in ("cache", "column", "offload") if getattr(entry, one)]
        if held or entry.shape.steps():
            other = held[0] if held else "shape"
            raise Problem(f"rewards.{name}.{other}", "is of scores, and spatial asks for maps: leave one of them out")
        for other in ("advantages", "image_set"):
            if getattr(config, other) is not None:
                raise Problem(other, f"does not go with rewards.{name}.spatial; leave one of them out")
        if config.rollout.scout is not None:
            raise Problem("rollout.scout", f"does not go with rewards.{name}.spatial; leave one of them out")


def check_shapes(rewards: Mapping[str, Reward], watch: Mapping[str, Watched]) -> None:
    """Raise Problem where steps name what is not there, read in a ring, have no effect, or can do nothing."""
    entries: dict[str, Watched] = {**watch, **rewards}
    for name, reward in rewards.items():
        where, shape = f"rewards.{name}.shape", reward.shape
        low, high = shape.clip or (0.0, None)
        if low is None and high is None:
            raise Problem(f"{where}.clip", "[null, null] bounds nothing; give one bound or leave it out")
        if low is not None and high is not None and low >= high:
            raise Problem(f"{where}.clip", f"[{low:g}, {high:g}]: the first is not below the second")
        if shape.modulate is not None:
            _check_other(f"{where}.modulate.by", name, shape.modulate.by, entries)
            check_unit(f"{where}.modulate", name, reward)
            check_unit(f"{where}.modulate.by", shape.modulate.by, entries[shape.modulate.by])
        if shape.confidence is not None:
            _check_other(f"{where}.confidence.by", name, shape.confidence.by, entries)
    _check_order(entries)
    used = read_by_steps(rewards, watch)
    for name, entry in watch.items():
        if entry.shape.steps() and name not in used:
            text = "no reward reads it, and what is watched is reported as it is; leave the steps out"
            raise Problem(f"watch.{name}.shape", text)


def check_unit(where: str, name: str, entry: Watched) -> None:
    """Base and bonus lie in [0, 1], by the reward's card or by a step: a negative base would invert the bonus."""
    from diffrl.rewards.registry import declared_range

    shape = entry.shape
    if shape.bound:
        return
    if isinstance(shape, Shape) and shape.clip == (0, 1):
        return
    low, high = declared_range(entry.plugin or name)
    if low < 0 or high > 1:
        text = f'"{name}" is not declared to lie in [0, 1] (its card: {low:g} to {high:g}); add shape.bound'
        raise Problem(where, text)


def _check_other(where: str, name: str, other: str, entries: Mapping[str, Watched]) -> None:
    if other == name:
        raise Problem(where, f'"{name}" names itself')
    if other not in entries:
        raise Problem(where, f'"{other}" is neither under rewards nor under watch{nearest(other, entries)}')


def _check_order(entries: Mapping[str, Watched]) -> None:
    try:
        in_order({name: entry.shape.steps() for name, entry in entries.items()})
    except ValueError as error:  # only optimised rewards read others
        name = str(error)
        raise Problem(f"rewards.{name}.shape", f'"{name}" is read by what it reads itself') from error
