"""HPS-v2.1: human preference learned on CLIP ViT-H/14, cosine of image and prompt."""

from __future__ import annotations

from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import Clip
from diffrl_zoo.loading import weights_file

REPOSITORY, FILE = "xswu/HPSv2", "HPS_v2.1_compressed.pt"


class HPSv2(Clip):
    """The cosine that HPS-v2.1's model gives image and prompt, about 0.2 to 0.4; times 100 with `scale`.

    `weights`: a file of weights (HPS-v2.0's work too), None for v2.1's from the hub. `model`: the `open_clip`
    architecture that they belong to. Pictures that are not square are padded with black, and what bicubic
    overshoots is not clamped, as in HPS's own code (under torchvision 0.17 or later: before, it did not antialias).
    """

    name = "hpsv2"
    card = card_of(name)

    def __init__(
        self,
        weights: str | None = None,
        model: str = "ViT-H-14",
        device: str | None = None,
        batch_size: int = 32,
        precision: str = "fp32",
        scale: bool = False,
    ) -> None:
        file = str(weights_file(weights, REPOSITORY, FILE, "hpsv2"))
        super().__init__(model, file, device, batch_size, precision, scale, resize_mode="hps")
