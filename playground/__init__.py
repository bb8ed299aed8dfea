"""A closed little world where the truth is computable, so that reward hacking can be measured.

`WORLD` is what the rest of diffrl knows of it, through the entry-point group `diffrl.worlds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diffrl.errors import UserError, nearest
from diffrl.resources import shipped, table_beside
from diffrl.stand_ins import StandIn
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
        return _set(source)[1]

    def prompts(self, source: str) -> Sequence[str]:
        from .scenes import prompt_set

        return prompt_set(*_set(source))

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
        """ "clip": its CLIP's image tower, images (B, 3, H, W) in [0, 1] to (B, F) on the CPU. The folder is in
        `open_clip`'s format: anyone loads it with `open_clip.create_model_and_transforms("local-dir:FOLDER")`."""
        if name != "clip":
            return None
        import open_clip
        import torch

        model: Any = open_clip.create_model(f"local-dir:{ASSETS / 'clip'}", device=str(device)).eval()
        mean, std = (torch.tensor(model.visual.preprocess_cfg[k]).view(1, 3, 1, 1).to(device) for k in ("mean", "std"))

        def embed(images: torch.Tensor) -> torch.Tensor:
            x, side = images.to(device).float(), (self.resolution, self.resolution)
            if x.shape[-2:] != side:
                x = torch.nn.functional.interpolate(x, size=side, mode="bicubic", antialias=True).clamp(0, 1)
            with torch.no_grad():
                return model.encode_image((x - mean) / std).float().cpu()

        return embed


def _set(source: str) -> tuple[str, str]:
    """(subset, split) of `playground/SUBSET/SPLIT`."""
    from .grammar import SPLITS, SUBSETS

    parts = source.split("/")
    if len(parts) != 3:
        text = "write playground/SUBSET/SPLIT, for example playground/compositional/train"
        raise UserError(f'prompt set "{source}": {text}')
    for name, choices, what in ((parts[1], SUBSETS, "subset"), (parts[2], SPLITS, "split")):
        if name not in choices:
            raise UserError(f'prompt set "{source}": unknown {what} "{name}"{nearest(name, choices)}')
    return parts[1], parts[2]


WORLD = Playground()
