"""The playground's preference model: a CLIP tuned on the choices of raters whose bias is known exactly.

What HPS or PickScore are to real models, with the truth about them at hand: how far a method follows the bias, and
whether a correction finds it, can be measured instead of guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffrl.errors import UserError
from diffrl.resources import shipped
from diffrl_playground.taste import BIAS, RIGHT
from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import CosineReward, clip_bytes, shared_clip

_PLANTED = ", ".join(f"{points} points for {name} {value}" for name, (value, points) in BIAS.items())


class Preference(CosineReward):
    """The raters' points for the image given the prompt, up to a constant: logit scale times cosine.

    The raters give RIGHT points for each stated fact that is right, and BIAS, whatever the prompt says; of two images
    they choose with the logistic chance of the difference. `model`: None for the shipped one, or a folder in
    `open_clip`'s format. `device`: None means an accelerator if there is one. `batch_size`: images per forward.
    """

    name = "preference"
    card = card_of(name, right=RIGHT, planted=_PLANTED)

    def __init__(self, model: str | None = None, device: str | None = None, batch_size: int = 64) -> None:
        folder = Path(model) if model else shipped("assets", "playground", "preference")
        if not folder.is_dir():
            raise UserError(f'preference: no folder "{folder}" with a model in open_clip\'s format')
        clip = shared_clip(str(folder), None, device, "fp32")
        super().__init__(clip, float(clip.model.logit_scale.exp().clamp(max=100.0)), batch_size)

    @staticmethod
    def footprint(model: str | None, **_: Any) -> int | None:
        """Bytes of its weights."""
        return clip_bytes(str(model or shipped("assets", "playground", "preference")), "fp32")
