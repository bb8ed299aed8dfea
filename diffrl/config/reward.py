"""A reward's entry in a config: the plugin with its arguments, and how its score is composed before it is optimised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, model_serializer

from diffrl.config.base import PAIR, PathText, Section, key, section
from diffrl.rewards.order import needed


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
    shape: Shape = section(Shape, "steps that change the score: clip, then bound, modulate, confidence; present = on")


def spatial(rewards: Mapping[str, Reward]) -> list[str]:
    """The rewards that are asked for their maps."""
    return [name for name, entry in rewards.items() if entry.spatial]


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
