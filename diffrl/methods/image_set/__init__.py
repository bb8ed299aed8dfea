"""Image sets: pictures with prompts and scores in the place of a rollout, or beside one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from diffrl.config.base import PathText, Problem, Section, at_key, key
from diffrl.config.methods import ForwardProcess
from diffrl.config.reward import read_by_steps
from diffrl.image_sets import FORM, PREFIX
from diffrl.image_sets.reading import ImageSet, folder_of, is_here, read_set
from diffrl.prompts import load_prompts
from diffrl.records.disk import check_writable


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
        """What makes the set's rows what they are, once they have been checked."""
        self._check_rows(config)
        return {"image_set.source (rows)": read_set(self.source).digest}

    def check(self, config: Any) -> None:
        """Raise Problem for what a set cannot be trained on, and, where it is here, for what its rows lack."""
        if not self.source:
            raise Problem("image_set.source", f"not given; name {FORM}")
        if not isinstance(config.objective_section, ForwardProcess):
            text = f'"{config.method.name}" trains on its own samples\' steps or rewards, which a set does not have'
            raise Problem("objective", f"{text}: use dpo, gdro, rwr, nft, crd, awm or dgpo with image_set")
        if config.rollout.scout is not None:
            raise Problem("rollout.scout", "chooses among images that are drawn, and a set's are there: leave one out")
        if abs(config.rollout.groups * self.share - config.given_groups) > 1e-6 or not config.given_groups:
            text = f"is {config.rollout.groups * self.share:g} of the {config.rollout.groups} prompts of an epoch"
            raise Problem("image_set.share", f"{self.share:g} {text} (rollout.groups), no whole number")
        if self.rival:
            self._check_rival(config)
        if self.source.startswith(PREFIX) and self.cache is None:
            text = f"not given; name a folder for the encoded pictures of {self.source}"
            raise Problem("image_set.cache", text)
        if not at_key("image_set.source", is_here, self.source):
            return  # it is drawn or fetched before the run, which begins by reading it; counting memory needs no set
        self._check_rows(config)
        cache = folder_of(self.source) if self.cache is None else Path(self.cache)
        at_key("image_set.cache", check_writable, cache, "the folder of encoded pictures")

    def check_world(self, config: Any, world: int) -> None:
        drawn, given = config.drawn_groups, config.given_groups
        if drawn and given and (drawn % world or given % world):
            text = f"{given} prompts of an epoch from the set and {drawn} drawn"
            raise Problem("image_set.share", f"{world} processes do not divide the {text}")
        if self.rival and config.rollout.groups % world:
            text = f"{world} processes do not divide the {config.rollout.groups} pairs of image_set.rival"
            raise Problem("rollout.groups", text)

    def _check_rival(self, config: Any) -> None:
        if not getattr(config.objective_section, "on_pairs", False):
            text = f'makes pairs, which are what dpo trains on, not "{config.method.name}"'
            raise Problem("image_set.rival", text)
        if self.share != 1:
            raise Problem("image_set.share", "with image_set.rival each prompt has a picture and an image: 1")
        if (size := config.rollout.group_size) != 2:
            raise Problem("rollout.group_size", f"{size}, but a pair of image_set.rival is 2")

    def _check_rows(self, config: Any) -> None:
        """Raise Problem unless the set can be read, has the scores, and no prompt that is tested on."""
        images = at_key("image_set.source", read_set, self.source)
        needed = [*config.rewards, *read_by_steps(config.rewards, config.watch)]
        for name in needed:
            at_key("image_set.source", images.check_column, name)
        size = 1 if self.rival else config.rollout.group_size
        count = len(self.fitting(images, size).groups)
        if config.given_groups > count:
            text = f"{config.given_groups} prompts an epoch from {self.source}, but {count} there have {size} pictures"
            text = text.replace("1 pictures", "a picture") if self.rival else f"{text} (rollout.group_size)"
            raise Problem("rollout.groups", f"{text} or more")
        trained = {group.prompt for group in images.groups}
        tested = [] if config.prompts.overlap else load_prompts(config.prompts.test)
        if shared := [prompt.text for prompt in tested if prompt.text in trained]:
            text = f'{len(shared)} of its prompts are in image_set, too, such as "{shared[0][:60]}"'
            raise Problem("prompts.test", f"{text}: to allow it on purpose set prompts.overlap: true")
