"""Where an image shows what the prompt asks for, by GenEval's detector: a map for SRUM's regional scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffrl.reward_kinds.mapped import known_means
from diffrl_zoo.cards import card_of
from diffrl_zoo.geneval import DETECTOR, GenEval
from diffrl_zoo.geneval_rules import Colours, Detection, Objects, partial_credit, placed


@dataclass(eq=False, repr=False, kw_only=True)
class GenEvalRegions(GenEval):
    """A map in [-1, 1], object by object: 1 on an object that the prompt asks for, in its colour, -1 on one of such a
    class that has another colour or is one too many. Of other places the prompt says nothing. An image without any
    object of the classes that are asked for is -1 everywhere.

    `whole`: the map is multiplied by the share of all that is right (`geneval` with mode: partial), as SRUM (arXiv
    2510.12784) multiplies by its global score a in [0, 1]; then positions and missing objects matter, too. All else is
    as in `GenEval`, whose detector and colour classifier it has.
    """

    name = "geneval_regions"
    maps = (32, 32)
    card = card_of(name, detector=DETECTOR)

    whole: bool = False
    mode: str = field(default="correct", init=False)

    def map(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """(B, 32, 32) in [-1, 1] of images (B, 3, H, W) in [0, 1]; NaN where the prompt says nothing of a place."""
        size = tuple(images.shape[-2:])
        return torch.stack([self._placed(size, *row) for row in self.seen(images, prompts, metadata)])

    def _placed(self, size: tuple[int, ...], objects: Objects, asked: Mapping[str, Any], colours: Colours) -> Tensor:
        named = remembered(colours)
        rows = sorted(placed(objects, asked, named), key=lambda row: row[0].score)  # the surer over the less sure
        fine = torch.full(size, torch.nan if rows else -1.0)
        for thing, right in rows:
            fine[_inside(thing, fine)] = 1.0 if right else -1.0
        cells = known_means(fine[None], self.maps)[0]
        return cells * partial_credit(objects, asked, named, self.thresholds.margin) if self.whole else cells

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """(B,) in [-1, 1] of images (B, 3, H, W) in [0, 1]: the map's mean over the places that it judges."""
        return self.map(images, prompts, metadata).flatten(1).nanmean(1)


def remembered(colours: Colours) -> Colours:
    """The same names, of which each object's is asked for once."""
    known: dict[int, str] = {}  # by the object's identity, which is of one class

    def ask(things: Sequence[Detection], name: str) -> list[str]:
        if new := [thing for thing in things if id(thing) not in known]:
            known.update(zip(map(id, new), colours(new, name), strict=True))
        return [known[id(thing)] for thing in things]

    return ask


def _inside(thing: Detection, image: Tensor) -> Tensor:
    """(H, W) bool: its mask, or its box where the detector gives none."""
    if thing.mask is not None:
        return thing.mask.cpu()
    rows, columns = torch.arange(image.shape[0])[:, None], torch.arange(image.shape[1])[None]
    x0, y0, x1, y1 = thing.box
    return (columns >= round(x0)) & (columns < round(x1)) & (rows >= round(y0)) & (rows < round(y1))
