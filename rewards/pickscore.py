"""PickScore: human preference learned on CLIP ViT-H/14 from Pick-a-Pic, with transformers' CLIPModel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import CosineReward, PairEncoder
from diffrl_zoo.loading import cannot_load, dtype_of, footprint_of, from_pretrained, frozen, pick_device
from diffrl_zoo.vision import read_processor

MODEL = "yuvalkirstain/PickScore_v1"
PARAMETERS = 986_109_441  # of the published model, a ViT-H/14
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the model's own repository has no tokenizer


class TransformersClip(PairEncoder):
    """A frozen `CLIPModel` of transformers; texts that are too long are cut."""

    layers = "vision_model.encoder.layers"

    def __init__(self, model: str, source: str, device: torch.device, precision: str) -> None:
        from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

        super().__init__()
        self.device, self.dtype = device, dtype_of(precision, "pickscore")
        with cannot_load("pickscore", model):
            self.model = frozen(CLIPModel, model, self.dtype, device)
            self.tokenizer = from_pretrained(AutoTokenizer, source)
            processor = from_pretrained(CLIPImageProcessor, source)
        read_processor(self, processor, f'pickscore: "{source}"')

    def image_features(self, pixels: Tensor) -> Tensor:
        return _features(self.model.get_image_features(pixels))

    def text_features(self, texts: list[str]) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return _features(self.model.get_text_features(**tokens.to(self.device)))


class PickScore(CosineReward):
    """`exp(logit_scale) * cosine` of image and prompt, about 15 to 25; only the cosine with `scale: false`.

    `model`: a hub id or a folder with a `CLIPModel`; `processor`: where its tokenizer and image processor are (None:
    the published ones for the published model, else the model's own). `precision`: fp32, bf16 or fp16.
    """

    name = "pickscore"
    card = card_of(name, model=MODEL)

    footprint = footprint_of({MODEL: PARAMETERS}, "AutoModel")

    def __init__(
        self,
        model: str = MODEL,
        processor: str | None = None,
        device: str | None = None,
        batch_size: int = 32,
        precision: str = "fp32",
        scale: bool = True,
    ) -> None:
        source = processor or (PROCESSOR if model.partition("@")[0] == MODEL else model)
        encoder = TransformersClip(model, source, pick_device(device), precision)
        factor = float(encoder.model.logit_scale.float().exp()) if scale else 1.0
        super().__init__(encoder, factor, batch_size)


def _features(output: Any) -> Tensor:
    """transformers returned the projected features themselves before it returned them as `pooler_output`."""
    return output if isinstance(output, Tensor) else output.pooler_output  # type: ignore[no-any-return]
