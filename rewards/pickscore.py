"""PickScore: human preference learned on CLIP ViT-H/14 from Pick-a-Pic, with transformers' CLIPModel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffrl.errors import UserError, nearest
from diffrl.rewards.protocol import Card
from diffrl_zoo.clip import PRECISIONS, TextCache, fit, pick_device, replaced
from diffrl_zoo.vision import transformers_bytes

MODEL = "yuvalkirstain/PickScore_v1"
PARAMETERS = 986_109_441  # of the published model, a ViT-H/14
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the model's own repository has no tokenizer


class PickScore:
    """`exp(logit_scale) * cosine` of image and prompt, about 15 to 25; only the cosine with `scale: false`.

    `model`: a hub id or a folder with a `CLIPModel`; `processor`: where its tokenizer and image processor are (None:
    the published ones for the published model, else the model's own). `precision`: fp32, bf16 or fp16.
    """

    name = "pickscore"
    differentiable = True
    embeds = True
    card = Card(
        measures="human preference for the image given the prompt: cosine in PickScore's space, times 100 "
        "(Flow-GRPO and its followers report this / 26)",
        range=(-100.0, 100.0),
        citation="Pick-a-Pic (Kirstain et al. 2023, arXiv:2305.01569)",
        weights=f"{MODEL} (4 GB)",
        licence="MIT",
        cost="a ViT-H/14: 2 GB in fp16",
        exploits="one glossy style for every prompt, at the cost of diversity (arXiv:2512.24146)",
    )

    def __init__(
        self,
        model: str = MODEL,
        processor: str | None = None,
        device: str | None = None,
        batch_size: int = 32,
        precision: str = "fp32",
        scale: bool = True,
    ) -> None:
        from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

        if precision not in PRECISIONS:
            raise UserError(f'pickscore: unknown precision "{precision}"{nearest(precision, PRECISIONS)}')
        source = processor or (PROCESSOR if model == MODEL else model)
        self.device, self.dtype, self.batch_size = pick_device(device), PRECISIONS[precision], batch_size
        try:
            network = CLIPModel.from_pretrained(model, dtype=self.dtype)
            self.tokenizer = AutoTokenizer.from_pretrained(source)
            images = CLIPImageProcessor.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise UserError(f'pickscore: cannot load "{model}": {" ".join(str(error).split())}') from error
        self.model: Any = network.eval().requires_grad_(False).to(self.device)
        self.size = (int(images.crop_size["height"]), int(images.crop_size["width"]))
        shortest = images.size.get("shortest_edge")
        if self.size[0] != self.size[1] or shortest != self.size[0]:
            raise UserError(f'pickscore: "{source}" resizes to {images.size} and crops to {self.size}; not supported')
        mean, std = (torch.tensor(v, device=self.device).view(3, 1, 1) for v in (images.image_mean, images.image_std))
        self.mean, self.std = mean, std
        self.factor = float(self.model.logit_scale.float().exp()) if scale else 1.0
        self._texts = TextCache(self._encode)

    @staticmethod
    def footprint(model: str, precision: str, **_: Any) -> int | None:
        """Bytes of its weights."""
        if model == MODEL and precision in PRECISIONS:
            return PARAMETERS * PRECISIONS[precision].itemsize
        return transformers_bytes("AutoModel", model, precision)

    def preprocess(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to the model's input, as its image processor does to a picture; differentiable."""
        return (fit(images.to(self.device, torch.float32), self.size, "shortest", middle=int) - self.mean) / self.std

    def embed_image(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] to unit vectors (B, D); gradients flow to the images."""
        return F.normalize(_features(self.model.get_image_features(self.preprocess(images).to(self.dtype))), dim=-1)

    def embed_text(self, prompts: Sequence[str]) -> Tensor:
        """Prompts to unit vectors (B, D), constants; texts that are too long are cut."""
        return self._texts(prompts)

    def _encode(self, texts: list[str]) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return F.normalize(_features(self.model.get_text_features(**tokens.to(self.device))), dim=-1)

    @property
    def image_layers(self) -> nn.ModuleList:
        """The layers of the image tower, the first one first."""
        return self.model.vision_model.encoder.layers  # type: ignore[no-any-return]

    def with_image_layers(self, layers: nn.ModuleList) -> Self:
        """This reward with other layers; everything else is shared."""
        new = copy(self)
        new.model = replaced(self.model, "vision_model.encoder.layers", layers)
        return new

    def score(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """(B,) of unit vectors (B, D)."""
        return self.factor * (image_embeddings * text_embeddings).sum(dim=-1)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        return self.score(self.embed_image(images), self.embed_text(prompts))


def _features(output: Any) -> Tensor:
    """transformers returned the projected features themselves before it returned them as `pooler_output`."""
    return (output if isinstance(output, Tensor) else output.pooler_output).float()
