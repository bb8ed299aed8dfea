"""HPS-v2.1: human preference learned on CLIP ViT-H/14, cosine of image and prompt."""

from __future__ import annotations

from diffrl.rewards.protocol import Card
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
    card = Card(
        measures="human preference for the image given the prompt: cosine in HPS-v2.1's space",
        range=(-1.0, 1.0),
        citation="HPS v2 (Wu et al. 2023, arXiv:2306.09341)",
        weights="xswu/HPSv2, HPS_v2.1_compressed.pt (2 GB)",
        licence="Apache-2.0",
        cost="a ViT-H/14: 2 GB in fp16",
        exploits="one glossy, saturated style for every prompt, at the cost of diversity (arXiv:2512.24146)",
    )

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
