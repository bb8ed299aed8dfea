"""How many tokens of a prompt a model reads, where its pipeline can be told: `text_length` of a config."""

from __future__ import annotations

from typing import Any

from diffrl.errors import UserError


def set_text_length(backbone: Any, tokens: int) -> None:
    """Have the backbone encode prompts as its pipeline does with `max_sequence_length=tokens`.

    UserError: the pipeline takes no such number (CLIP alone reads what it was trained on), or a smaller one.
    """
    most = getattr(backbone, "longest_text", None)  # that the pipeline's own checks let pass
    if "max_sequence_length" not in backbone.plain_call:
        raise UserError(
            "text_length: this model's pipeline takes none, what it reads of a prompt is fixed; leave the key out"
        )
    if most is not None and tokens > most:
        raise UserError(f"text_length: {tokens} tokens, but this model's pipeline reads at most {most}")
    backbone.max_length = tokens
    backbone.plain_call = {**backbone.plain_call, "max_sequence_length": tokens}
