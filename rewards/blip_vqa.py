"""BLIP-VQA, T2I-CompBench's judge of attributes: whether BLIP says yes to each noun phrase of the prompt, multiplied.

The phrases are `phrases` of the metadata, or spaCy's noun chunks with its model en_core_web_sm, as in the benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from diffrl.rewards.protocol import RewardError
from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import fit
from diffrl_zoo.imagereward import PIXEL_MEAN, PIXEL_STD
from diffrl_zoo.loading import cannot_load, channels, dtype_of, footprint_of, from_pretrained, frozen, pick_device

MODEL = "Salesforce/blip-vqa-capfilt-large"
NOT_ASKED = ("top", "the side", "the left", "the right")  # chunks that are places
MOST, TOKENS = 8, 35  # phrases of a prompt, tokens of a question
PARSER = "en_core_web_sm"
_DROPPED = re.compile(r"[.!\"()*#:;~]")


@lru_cache(maxsize=1)
def language() -> Any:
    """spaCy's reader of English, which T2I-CompBench uses; None where it or its model is not installed."""
    try:
        import spacy

        return spacy.load(PARSER)
    except (ImportError, OSError):
        return None


def _parser() -> Callable[[str], list[str]] | None:
    """The noun phrases of a text by spaCy; None where there is none."""
    read = language()
    return None if read is None else lambda text: [chunk.text for chunk in read(text).noun_chunks]


class BlipVqa:
    """The product, over the prompt's noun phrases, of P(yes) / (P(yes) + P(no)) of BLIP's answer to "PHRASE?".

    `model`: a hub id or folder of transformers' `BlipForQuestionAnswering`. `batch_size`: images a call.
    """

    name = "blip_vqa"
    card = card_of(name, model=MODEL)

    def __init__(
        self, model: str = MODEL, device: str | None = None, batch_size: int = 16, precision: str = "fp32"
    ) -> None:
        from transformers import AutoTokenizer, BlipForQuestionAnswering

        self.device, self.dtype, self.batch_size = pick_device(device), dtype_of(precision, "blip_vqa"), batch_size
        with cannot_load("blip_vqa", model):
            self.network = frozen(BlipForQuestionAnswering, model, self.dtype, self.device)
            self.tokenizer = from_pretrained(AutoTokenizer, model)
        self.parser = _parser()
        self._phrases: dict[str, list[str]] = {}
        config = self.network.config
        text = config.text_config
        self.begin, self.encode = text.bos_token_id, text.vocab_size - 1  # [DEC] and [ENC], the last two of BLIP's
        self.words = self.tokenizer.convert_tokens_to_ids(["yes", "no"])
        self.size: int = config.vision_config.image_size
        self.mean, self.std = channels(self.device, PIXEL_MEAN, PIXEL_STD)

    footprint = footprint_of({}, "AutoModelForVisualQuestionAnswering")

    def phrases(self, prompt: str, metadata: Mapping[str, Any]) -> list[str]:
        """What is asked about, at most eight; found once for a prompt."""
        if metadata.get("phrases"):
            return [str(phrase) for phrase in metadata["phrases"]][:MOST]
        if self.parser is None:
            todo = f"install it (pip install spacy, python -m spacy download {PARSER}), or give `phrases` as metadata"
            raise RewardError(f'blip_vqa: the noun phrases of "{prompt}" are found by spaCy and {PARSER}: {todo}')
        if prompt not in self._phrases:
            self._phrases[prompt] = [chunk for chunk in self.parser(prompt) if chunk not in NOT_ASKED][:MOST]
        return self._phrases[prompt]

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]; 1 where a prompt has no noun phrase."""
        pixels = fit(images.to(self.device, torch.float32), (self.size, self.size), "squash").clamp(0, 1)
        seen = self.network.vision_model(pixel_values=((pixels - self.mean) / self.std).to(self.dtype))[0]
        asked = [self.phrases(*pair) for pair in zip(prompts, metadata, strict=True)]
        rows = [i for i, phrases in enumerate(asked) for _ in phrases]
        scores = torch.ones(len(images))
        if rows:
            yes = self._yes([phrase for phrases in asked for phrase in phrases], seen[rows])
            for i, p in zip(rows, yes.tolist(), strict=True):
                scores[i] *= p
        return scores

    def _yes(self, phrases: Sequence[str], seen: Tensor) -> Tensor:
        """(N,): yes over yes and no, the first token of the answer to each phrase about seen (N, patches, D)."""
        questions = [_DROPPED.sub("", f"{phrase}?".lower()).rstrip(" ") for phrase in phrases]
        tokens = self.tokenizer(questions, truncation=True, max_length=TOKENS)["input_ids"]
        answers = torch.empty(len(tokens))
        for length in {len(ids) for ids in tokens}:  # without padding, to which transformers' BLIP attends
            rows = [i for i, ids in enumerate(tokens) if len(ids) == length]
            ids = torch.tensor([tokens[i] for i in rows], device=self.device)
            ids[:, 0] = self.encode
            hidden = self.network.text_encoder(input_ids=ids, encoder_hidden_states=seen[rows])[0]
            start = torch.full((len(ids), 1), self.begin, device=self.device)
            answer = self.network.text_decoder(start, encoder_hidden_states=hidden).logits
            first = answer[:, 0].float().softmax(dim=-1)[:, self.words]
            answers[rows] = (first[:, 0] / first.sum(dim=1)).cpu()
        return answers
