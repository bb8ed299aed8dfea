"""How long a run's prompts are for the families whose texts keep their own lengths.

Asked of the pipeline's own code with its own tokenizer, before a text encoder that says nothing: no weights are read,
nothing is downloaded.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.hub import pinned
from diffrl.policy.pipelines import without_bars
from diffrl.policy.text_cache import quiet
from diffrl.prompts import load_prompts

NEAR = 3  # prompts of the most tokens that are asked for exactly: at a template's joint a token more or less is read


def longest_text(family: type, source: str, pipeline: str, most: int, config: Config) -> int | None:
    """Tokens of the longest prompt that training and evaluations draw, as the family's network gets them.

    None where that cannot be asked: the model's tokenizer, or a prompt set, is not on this machine.

    Args:
        family: whose `encode` is asked.
        source: the model's folder or hub id.
        pipeline: its class in diffusers.
        most: tokens that the pipeline is asked to read.
    """
    given = (config.prompts.train, config.prompts.test)
    sources = [name for one in given for name in ([one] if isinstance(one, str) else one)]
    try:
        texts = dict.fromkeys(prompt.text for name in sources for prompt in load_prompts(name))
    except UserError:
        return None
    return _longest(family, source, pipeline, most, tuple(texts))


@functools.lru_cache(maxsize=8)  # advice estimates again and again
def _longest(family: Any, source: str, pipeline: str, most: int, texts: tuple[str, ...]) -> int | None:
    try:
        with quiet(), without_bars(), torch.no_grad():
            pipe = _reading(pipeline, source)
            reader = getattr(pipe, "tokenizer", None) or pipe.processor.tokenizer
            counts = [len(ids) for ids in reader(list(texts)).input_ids]
            if not any(counts):
                return None  # a tokenizer's config without its vocabulary
            backbone = object.__new__(family)
            backbone.pipe, backbone.max_length = pipe, most
            order = sorted(range(len(texts)), key=counts.__getitem__)[-NEAR:]
            return max(backbone.encode(texts[i], torch.device("cpu")).embeds.shape[1] for i in order)
    except (AttributeError, ImportError, OSError, TypeError, ValueError):  # libraries, on what is not there
        return None


def _reading(name: str, source: str) -> Any:
    """As much of a pipeline as reads a prompt."""
    where, at = pinned(source)
    pipeline: Any = getattr(diffusers, name)
    index = pipeline.load_config(where, local_files_only=True, **at)
    parts = (name for name, entry in index.items() if isinstance(entry, list))
    absent = {name: None for name in parts if name not in ("tokenizer", "processor")}
    pipe = pipeline.from_pretrained(where, local_files_only=True, **at, **absent)
    pipe.text_encoder = Mute()
    return pipe


class Mute:
    """Stands for a text encoder."""

    dtype, device = torch.float32, torch.device("cpu")
    model = SimpleNamespace(norm=torch.nn.Identity())  # whose norm Qwen-Image 2.1's pipeline takes away

    def __call__(self, input_ids: Tensor, *rest: Any, **more: Any) -> Any:
        return Layers(input_ids.new_zeros(*input_ids.shape, 1, dtype=self.dtype))


class Layers:
    """Every layer, or the first output, of a text encoder that says nothing."""

    def __init__(self, zeros: Tensor) -> None:
        self.zeros, self.hidden_states = zeros, self

    def __getitem__(self, layer: int) -> Tensor:
        return self.zeros
