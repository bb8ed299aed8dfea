"""What a vision-language model is asked (`questions.yaml`), and what it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diffrl.resources import table_beside

ASK: dict[str, Any] = table_beside(__file__, "questions.yaml")
_ALOUD = r"(think|thinking|thoughts?|analysis|reasoning|reflection|scratchpad)"
_THOUGHT = re.compile(rf"[<\[◁]{_ALOUD}[>\]▷].*?(?:[<\[◁]/\1[>\]▷]|\Z)", re.DOTALL | re.IGNORECASE)
# Where the template opened the thought, and in the channels of gpt-oss: all before this.
_BEFORE = re.compile(rf"\A.*(?:[<\[◁]/{_ALOUD}[>\]▷]|<\|channel\|>final<\|message\|>)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """Images (each (3, H, W) in [0, 1]) and what is asked about them; `prompt` is named when it fails.

    `words`: the spellings of answers whose first tokens are looked at (none: of yes and no). `lines`: how many answers
    are asked for, a line each; more than one fill `Reply.lines`. `form`: a JSON schema of the answer, for a server that
    binds answers to one, where the first answer could not be read.
    """

    images: Sequence[Tensor]
    text: str
    prompt: str
    words: Sequence[str] = ()
    lines: int = 1
    form: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reply:
    """The answer's text, and, if asked for, candidates for its first token with their probabilities; `lines`: of the
    first token of every line that is not empty."""

    text: str
    first: Sequence[tuple[str, float]] = ()
    lines: Sequence[Sequence[tuple[str, float]]] = ()

    @property
    def said(self) -> str:
        """The text without what the model thought aloud."""
        return _BEFORE.sub("", _THOUGHT.sub(" ", self.text))


class Unreadable(ValueError):
    """An answer that cannot be understood; the message quotes it."""


def form_of(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A JSON schema: an explanation, then these values by their names."""
    properties = {"explanation": {"type": "string"}, **values}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def of_each(images: Tensor, text: str, prompts: Sequence[str], form: Mapping[str, Any] | None = None) -> list[Question]:
    """The question `text`, with {prompt} where the prompt goes, about each of the images (B, 3, H, W)."""
    pairs = zip(images, prompts, strict=True)
    return [Question([image], text.replace("{prompt}", prompt), prompt, form=form) for image, prompt in pairs]
