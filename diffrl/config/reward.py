"""A reward's entry in a config: the plugin with its arguments, and how its score is composed before it is optimised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, model_serializer

from diffrl.config.base import PAIR, PathText, Problem, Section, key, section
from diffrl.errors import nearest
from diffrl.rewards.order import in_order, needed


class Bound(Section):
    at: FiniteFloat | None = key(
        None, "the score that becomes 1/2; null: the mean of the first epoch, the base model's"
    )
    scale: FiniteFloat = key(1.0, "how far above that a score becomes 0.73", gt=0)


class Modulate(Section):
    by: str = key("", "the reward, under rewards or watch, that is the bonus; in [0, 1], as this one")
    base: FiniteFloat = key(0.4, "what this score counts where the bonus is 0; 1 where it is 1", ge=0, le=1)


class Confidence(Section):
    by: str = key("", "the reward, under rewards or watch, whose order inside a group is compared with this one's")


class Unit(Section):
    """The step that brings a watched reward into [0, 1], for one that it modulates; present = on."""

    bound: Bound | None = key(None, "sigmoid((s - at) / scale): little is gained far above a reference (PAR)")

    @model_serializer(mode="wrap")
    def _on(self, serialise: Any) -> dict[str, Any]:
        """Steps that are off are left out, or reading them again would switch them on."""
        return {name: value for name, value in serialise(self).items() if value is not None}

    def steps(self) -> dict[str, dict[str, Any]]:
        """{step: arguments} for `diffrl.rewards.compose`; a bound of null is left to its default."""
        found = self.model_dump()
        if "clip" in found:
            found["clip"] = dict(zip(("low", "high"), found["clip"], strict=True))
        return {name: {k: v for k, v in arguments.items() if v is not None} for name, arguments in found.items()}


class Shape(Unit):
    """Steps from the plain score to what is optimised; applied in the order of `diffrl.rewards.order.STEPS`."""

    clip: Annotated[tuple[FiniteFloat | None, FiniteFloat | None], PAIR] | None = key(
        None, "[low, high] within which the score is held; null: no bound on this side"
    )
    modulate: Modulate | None = key(None, "s (base + (1 - base) by): base and bonus, not a sum (FIRM)")
    confidence: Confidence | None = key(
        None, "exp(-u / std u) of the distance from the group's mean: u is how far another judge disagrees (Ctrl-U)"
    )


class Watched(BaseModel):
    """A reward plugin that is scored and not optimised; keys beside these go to its constructor, too."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    plugin: PathText | None = key(None, "a plugin's name, or path/to/file.py:Class; null: the same as NAME")
    column: str | None = key(
        None,
        "which of the named scores of a reward with several (`columns`); entries with the same plugin and arguments "
        "share a request",
    )
    retries: int = key(0, "further attempts after the reward raised an exception", "attempts", ge=0)
    timeout: FiniteFloat | None = key(600.0, "how long one call may take; null: no limit", "seconds", gt=0)
    unscored: FiniteFloat = key(
        0.02, "images of an epoch that may go without a score: more than chance explains at this share ends the run",
        "share", ge=0, le=1,
    )  # fmt: skip
    cache: PathText | None = key(None, "folder that keeps the scores of images seen before; null: none is kept")
    offload: Literal[False, True, "apart"] = key(
        False,
        "the reward's weights are in main memory while the network is optimised; apart: the network is there while the "
        "reward scores, too, after an epoch's sampling: for rewards that do not fit beside it",
    )
    shape: Unit = section(Unit, "for the reward that it modulates; present = on")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the plugin's constructor."""
        return dict(self.model_extra or {})


class Reward(Watched):
    """A reward plugin that is optimised."""

    weight: FiniteFloat = key(1.0, "factor of this reward's score in the sum that is optimised")
    spatial: bool = key(
        False,
        "its map says where an image is right: each latent cell has an advantage of its own (SRUM); false: its mean",
    )
    shape: Shape = section(Shape, "from the score to what is optimised: steps in this order, each present = on")


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


def spatial(rewards: Mapping[str, Reward]) -> list[str]:
    """The rewards that are asked for their maps."""
    return [name for name, entry in rewards.items() if entry.spatial]


def check_spatial(rewards: Mapping[str, Reward], config: Any) -> None:
    """Raise Problem where a reward's map cannot be had, or could not weigh latent cells."""
    from diffrl.rewards.registry import has_method

    for name in spatial(rewards):
        entry = rewards[name]
        where, method = f"rewards.{name}.spatial", config.method
        if has_method(entry.plugin or name, "map") is False:
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


def read_by_steps(rewards: Mapping[str, Reward], watch: Mapping[str, Watched]) -> list[str]:
    """The watched rewards that the steps of optimised ones read, directly or through others."""
    read = needed({name: entry.shape.steps() for name, entry in {**watch, **rewards}.items()}, list(rewards))
    return [name for name in watch if name in read]


def auxiliary_names(config: Any) -> list[str]:
    """Watched rewards that a method reads on training images, too, without optimising them."""
    return [name for one in config.methods for name in getattr(getattr(config, one.name), "auxiliary", ())]


def read_on_training_images(config: Any) -> list[str]:
    """Watched rewards that score training images, too: auxiliary ones, then those that steps of optimised ones read."""
    auxiliary = auxiliary_names(config)
    return [*auxiliary, *(name for name in read_by_steps(config.rewards, config.watch) if name not in auxiliary)]
