"""DeQA-Score: the expected level of the word that mPLUG-Owl2 would give a picture's quality; blind to the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.hub import pinned
from diffrl_zoo.cards import card_of
from diffrl_zoo.loading import cannot_load, dtype_of, footprint_of, from_pretrained, pick_device
from diffrl_zoo.vision import SquareInput, complete

MODEL = "zhiyuanyou/DeQA-Score-Mix3"
PARAMETERS = 8_200_000_000  # about
# The words that the model was tuned with, before and after the image, and its five levels from 5 to 1.
BEFORE, AFTER = "USER: How would you rate the quality of this image?\n", "\nASSISTANT: The quality of the image is"
LEVELS = ("excellent", "good", "fair", "poor", "bad")


class DeQA:
    """The expected level of the quality of an image, from 1 (bad) to 5 (excellent), without regard to the prompt.

    `model`: hub id or folder of a DeQA-Score or Q-Align (mPLUG-Owl2, with its tokenizer and image processor).
    `precision`: fp32, bf16 or fp16 (the published one).
    """

    name = "deqa"
    differentiable = True
    card = card_of(name, model=MODEL)

    def __init__(
        self, model: str = MODEL, device: str | None = None, batch_size: int = 16, precision: str = "fp16"
    ) -> None:
        from transformers import AutoTokenizer, LlamaConfig

        from diffrl_zoo.mplug_owl2 import MplugOwl2

        dtype = dtype_of(precision, "deqa")
        self.device, self.batch_size = pick_device(device), batch_size
        with cannot_load("deqa", model):
            source, at = pinned(model)
            settings, _ = LlamaConfig.get_config_dict(source, **at)
            if "visual_config" not in settings:
                raise UserError(f'deqa: "{model}" is not an mPLUG-Owl2 (its config has no visual_config)')
            config = LlamaConfig.from_dict({**settings, "model_type": "llama"})
            self.network: Any = complete(MplugOwl2, model, config, dtype, f'deqa: "{model}"')
            self.tokenizer = from_pretrained(AutoTokenizer, model)
            self.preprocess = SquareInput(model, self.device)
        self.network.to(self.device)
        self.before, self.after = self._tokens(BEFORE), self._tokens(AFTER)[1:]
        self.levels = [int(self._tokens(word)[1]) for word in LEVELS]  # behind the mark of a text's beginning
        if len(set(self.levels)) < len(LEVELS):
            raise UserError(f'deqa: the levels {", ".join(LEVELS)} are not words of the tokenizer of "{model}"')

    footprint = footprint_of({MODEL: PARAMETERS})

    def _tokens(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text).input_ids, device=self.device)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]; gradients flow to the images."""
        pixels = self.preprocess(images).to(self.network.dtype)
        logits = self.network.next_word(self.before, pixels, self.after)[:, self.levels]
        return logits.float().softmax(dim=-1) @ torch.arange(5.0, 0.0, -1.0, device=self.device)
