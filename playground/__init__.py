"""A closed little world where the truth is computable, so that reward hacking can be measured.

`WORLD` is what the rest of diffrl knows of it, through the entry-point group `diffrl.worlds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diffrl.resources import shipped, table_beside
from diffrl.tools.stand_ins import StandIn
from diffrl.worlds import World

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .variety import GroupVariety

ASSETS = shipped("assets", "playground")
_STAND_INS: dict[str, Any] = table_beside(__file__, "stand_ins.yaml")
STAND_INS = {reward: StandIn(**one) for reward, one in _STAND_INS.items()}


class Playground(World):
    name = "playground"
    pipeline = ASSETS / "pipeline"
    resolution = 64
    loras = {"playground/turbo": ASSETS / "turbo"}  # noqa: RUF012
    features = "clip"
    stand_ins = STAND_INS
    meanings = {  # noqa: RUF012
        "variety": "how much images differ in what prompts leave free (1: as in the world)",
        "unreadable": "the share of free facts that could not be read",
    }

    @property
    def figures(self) -> GroupVariety:
        from .variety import FIGURES

        return FIGURES

    @property
    def divgen(self) -> ModuleType:
        from . import divgen

        return divgen

    def split(self, source: str) -> str:
        from .grammar import named_set

        return named_set(source)[1]

    def prompts(self, source: str) -> Sequence[str]:
        from .grammar import named_set
        from .scenes import prompt_set

        return prompt_set(*named_set(source))

    def foreign(self, texts: Sequence[str]) -> str:
        from .grammar import foreign

        return foreign(texts)

    def sample(self, each: int, rng: np.random.Generator) -> list[str]:
        from .grammar import KINDS
        from .scenes import sample_caption

        return [sample_caption(rng, "test", kind).text() for kind in KINDS for _ in range(each)]

    def draw(self, text: str, rng: np.random.Generator) -> np.ndarray:
        from .renderer import draw

        return draw(text, rng)

    def feature_space(self, name: str, device: torch.device | str) -> Any:
        """ "clip": its CLIP's image tower."""
        if name != "clip":
            return None
        from .clip_features import clip_features

        return clip_features(ASSETS / "clip", self.resolution, device)


WORLD = Playground()
