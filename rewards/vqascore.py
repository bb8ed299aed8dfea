"""VQAScore: how probable the answer "Yes" is to the question whether the image shows the prompt, by CLIP-FlanT5."""

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

MODEL = "zhiqiulin/clip-flant5-xxl"
TOKENIZERS = {MODEL: "google/flan-t5-xxl", "zhiqiulin/clip-flant5-xl": "google/flan-t5-xl"}
PARAMETERS = {MODEL: 11_460_000_000, "zhiqiulin/clip-flant5-xl": 3_170_000_000}  # with CLIP ViT-L/14 at 336 px, about
# The words that the model was tuned with.
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
QUESTION, ANSWER = 'Does this figure show "{prompt}"? Please answer yes or no.', "Yes"
LENGTH = 2048  # tokens of a question, the image's not counted


class VQAScore:
    """The probability of "Yes" and the end after it, their geometric mean as in the original, in [0, 1].

    `model`: hub id or folder of a CLIP-FlanT5; `tokenizer`: its T5's (None: the published one, or the folder's).
    `question`: with {prompt} where the prompt goes. `precision`: fp32, bf16 or fp16 (T5 overflows in fp16). Of other
    vision-language models the reward `vlm` with `mode: yes` gives the same measure, as P(yes) / (P(yes) + P(no)).
    """

    name = "vqascore"
    differentiable = True
    card = card_of(name, model=MODEL)

    def __init__(
        self,
        model: str = MODEL,
        tokenizer: str | None = None,
        question: str = QUESTION,
        device: str | None = None,
        batch_size: int = 8,
        precision: str = "bf16",
    ) -> None:
        from transformers import AutoTokenizer, CLIPVisionConfig, T5Config

        from diffrl_zoo.clip_t5 import ClipT5

        dtype = dtype_of(precision, "vqascore")
        self.device, self.batch_size, self.question = pick_device(device), batch_size, question
        with cannot_load("vqascore", model):
            source, at = pinned(model)
            settings, _ = T5Config.get_config_dict(source, **at)
            tower = settings.get("mm_vision_tower")
            if tower is None or not str(settings.get("mm_projector_type")).endswith("x_gelu"):
                raise UserError(f'vqascore: "{model}" is not a CLIP-FlanT5 (its config has no mm_vision_tower)')
            vision = from_pretrained(CLIPVisionConfig, tower).to_dict()
            config = T5Config.from_dict({**settings, "model_type": "t5", "vision": vision})
            self.network: Any = complete(ClipT5, model, config, dtype, f'vqascore: "{model}"')
            self.tokenizer = from_pretrained(AutoTokenizer, tokenizer or TOKENIZERS.get(source, model))
            self.preprocess = SquareInput(tower, self.device)
        self.network.to(self.device)
        self.before = self._tokens(f"{SYSTEM} USER: ")
        self.wanted = self._tokens(ANSWER)

    footprint = footprint_of(PARAMETERS)

    def _tokens(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text).input_ids, device=self.device)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]; gradients flow to the images."""
        asked = [f"\n{self.question.replace('{prompt}', prompt)} ASSISTANT: " for prompt in prompts]
        room = LENGTH - len(self.before) - 1
        after = [self._tokens(text)[:room] for text in asked]
        pixels = self.preprocess(images).to(self.network.dtype)
        return self.network.answer(self.before, pixels, after, self.wanted).mean(dim=1).exp()
