"""The config's section of an image set: pictures with prompts and scores in the place of a rollout, or beside one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import FiniteFloat

from diffrl.config.base import PathText, Section, key
from diffrl.image_sets import FORM

if TYPE_CHECKING:
    from diffrl.image_sets.reading import ImageSet as Pictures


class ImageSet(Section):
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

    def fitting(self, images: Pictures, size: int) -> Pictures:
        """The set without what no epoch can use: groups of fewer than `size` pictures, or, with `rival`, prompts that
        come again."""
        return images.once() if self.rival else images.of_size(size)

    def contents(self, config: Any) -> dict[str, Path | str]:
        from diffrl.config.image_set_checks import contents

        return contents(self, config)

    def check(self, config: Any) -> None:
        from diffrl.config.image_set_checks import check

        check(self, config)
