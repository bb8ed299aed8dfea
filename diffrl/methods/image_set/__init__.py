"""Image sets: pictures with prompts and scores in the place of a rollout, or beside one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import FiniteFloat

from diffrl.config.base import PathText, Problem, Section, key
from diffrl.image_sets import FORM

if TYPE_CHECKING:
    from diffrl.image_sets.reading import ImageSet


class ImageSetSection(Section):
    about = "scored pictures that are trained on in place of a rollout's"
    source: PathText = key("", f"{FORM}: pictures with prompts and scores (docs/methods/sets.md)")
    share: FiniteFloat = key(
        1.0,
        "share of an epoch's prompts that come from it; 1: all, and prompts.train is not used",
        gt=0,
        le=1,
    )
    rival: bool = key(
        False,
        "a pair is a prompt's best picture and an image that is drawn for it in each epoch, by dpo.ring's reference if "
        "there is one, not two pictures (SePPO); for dpo with rollout.group_size: 2",
    )
    cache: PathText | None = key(
        None, "folder of the encoded pictures; null: .latents in the set's folder (a hub's set has none)"
    )

    def fitting(self, images: ImageSet, size: int) -> ImageSet:
        """The set without what no epoch can use: groups of fewer than `size` pictures, or, with `rival`, prompts that
        come again."""
        return images.once() if self.rival else images.of_size(size)

    def gives(self, config: Any) -> int:
        return round(config.rollout.groups * self.share)

    def contents(self, config: Any) -> dict[str, Path | str]:
        from diffrl.methods.image_set.checks import contents

        return contents(self, config)

    def check(self, config: Any) -> None:
        from diffrl.methods.image_set.checks import check

        check(self, config)

    def check_world(self, config: Any, world: int) -> None:
        drawn, given = config.drawn_groups, config.given_groups
        if drawn and given and (drawn % world or given % world):
            text = f"{given} prompts of an epoch from the set and {drawn} drawn"
            raise Problem("image_set.share", f"{world} processes do not divide the {text}")
        if self.rival and config.rollout.groups % world:
            text = f"{world} processes do not divide the {config.rollout.groups} pairs of image_set.rival"
            raise Problem("rollout.groups", text)
