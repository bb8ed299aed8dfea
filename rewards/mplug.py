"""mPLUG, DPG-Bench's judge: answers in words to questions about a picture, by ModelScope's pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError, in_one_line
from diffrl.rewards.protocol import RewardError
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import to_pictures
from diffrl_zoo.loading import pick_device
from diffrl_zoo.vlm.parse import questions_of

MODEL = "damo/mplug_visual-question-answering_coco_large_en"
INSTALL = "pip install 'modelscope[multi-modal]'; ELLA's requirements-for-dpg_bench.txt has the rest"


class Mplug:
    """The share of the prompt's questions (`vqa_list` of the metadata: [[question, answer], ...]) answered right.

    An answer is right if it is the expected word to the letter, in small letters, as in DPG-Bench's script. `model`: a
    name of ModelScope's hub, or a folder.
    """

    name = "mplug"
    card = card_of(name, model=MODEL, install=INSTALL)

    def __init__(self, model: str = MODEL, device: str | None = None) -> None:
        try:
            from modelscope.pipelines import pipeline
            from modelscope.utils.constant import Tasks
        except ImportError as error:
            raise UserError(f"mplug: it comes with modelscope ({in_one_line(error)}): {INSTALL}") from error
        self.device = pick_device(device)
        try:
            self.ask: Any = pipeline(Tasks.visual_question_answering, model=model, device=str(self.device))
        except Exception as error:  # of whatever modelscope and its parts raise
            raise UserError(f'mplug: cannot load "{model}": {in_one_line(error, most=200)}') from error

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """True for prompts with questions."""
        return bool(metadata.get("vqa_list"))

    def answers(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[list[float]]:
        """For each of the images (B, 3, H, W) in [0, 1] 1 or 0 for each question of its prompt."""
        return [self._answers(*row) for row in zip(to_pictures(images), prompts, metadata, strict=True)]

    def _answers(self, image: Any, prompt: str, metadata: Mapping[str, Any]) -> list[float]:
        values = []
        for question, right in questions_of(prompt, metadata, self.name):
            reply = self.ask({"image": image, "question": question})
            if not isinstance(reply, Mapping) or not isinstance(reply.get("text"), str):
                raise RewardError(
                    f'mplug: the prompt "{prompt}": no text in the answer to "{question}": {str(reply)[:80]}'
                )
            values.append(float(reply["text"] == right.lower()))
        return values

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        answers = self.answers(images, prompts, metadata)
        return torch.tensor([sum(values) / len(values) for values in answers], dtype=torch.float32)
