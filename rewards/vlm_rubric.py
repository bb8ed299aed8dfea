"""A vision-language model that judges an image by several criteria in one request: a named column for each.

An answer that does not give every criterion its number is never a number: see `vlm_backends`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError, nearest
from diffrl.rewards.protocol import Card
from diffrl_zoo.vlm_backends import Question, Reply, Unreadable, bytes_in_process, make_backend

ASK = 'The image was made for this prompt: "{prompt}". '
GRADES = (
    "Judge it by each of these criteria, with a number from {low:g} (very bad) to {high:g} (perfect), or n/a where a "
    "criterion says so:"
)
COUNTS = (
    "Look for faults of each of these kinds and count those that a careful person would notice, up to {high:g}; 0 "
    "where there is none:"
)
THINK = (
    " First think aloud, one criterion after another: what the image shows, what speaks for it and what against it, "
    "and only then the number."
)
END = " The last {count} lines of your answer must be exactly, in this order:\n{lines}"


@dataclass(frozen=True)
class Rubric:
    """Criteria by the names of their columns, in words. `faults`: faults are counted, and a score is minus the count.
    low, high: of the numbers that the judge gives."""

    criteria: Mapping[str, str]
    faults: bool = False
    low: float = 1.0
    high: float = 5.0


RUBRICS = {
    "general": Rubric({
        "content": "everything that the prompt asks for is there and nothing else of weight: things, numbers of them, "
        "colours, places, actions",
        "text": "every word that the prompt asks for is written, letter by letter; n/a if it asks for no writing",
        "style": "the style, medium or mood that the prompt asks for; n/a if it asks for none",
        "quality": "sharp, well exposed, well composed, without noise, smears or seams",
        "soundness": "bodies, objects, shadows and perspective are as they could be",
    }),
    # The kinds follow MagicMirror's taxonomy (arXiv:2509.10260) as its abstract sketches it; the words are ours.
    "faults": Rubric({
        "anatomy": "people and animals: a wrong number of limbs or fingers, joints bent wrongly, faces out of shape",
        "structure": "things: broken, melted, doubled or incomplete shapes, parts that belong to nothing",
        "interaction": "things and people together: grips that hold nothing, bodies that pass through each other",
        "physics": "light, shadow, reflection, support and perspective that contradict each other",
        "rendering": "smears, noise, seams, garbled letters",
    }, faults=True, low=0.0, high=5.0),
}  # fmt: skip


def read_columns(reply: Reply, names: Sequence[str], low: float, high: float) -> list[float]:
    """The numbers of the answer's last lines, `NAME: X` for each of the names in their order, NaN for `n/a`.

    Raises `Unreadable` for other lines there, and for a number outside `low` to `high`.
    """
    lines = [" ".join(line.replace("*", "").split()) for line in reply.text.splitlines()]
    last = [line for line in lines if line][-len(names) :]
    if len(last) < len(names):
        raise Unreadable(f"{len(last)} lines, not one for each of {', '.join(names)}: {reply.text[-200:]!r}")
    values = []
    for name, line in zip(names, last, strict=True):
        match = re.fullmatch(rf"{re.escape(name)} ?[:=] ?(-?\d+(?:\.\d+)?|n/?a)\.?", line, re.IGNORECASE)
        if match is None:
            raise Unreadable(f'"{line[:80]}" is not "{name}: X"')
        value = float("nan") if match[1].lower().startswith("n") else float(match[1])
        if value < low or value > high:
            raise Unreadable(f'"{line}" is not a number from {low:g} to {high:g}')
        values.append(value)
    return values


class VlmRubric:
    """A vision-language model's numbers for several criteria, in one request an image: a column for each.

    `rubric`: general (content, text, style, quality, soundness: 1 to 5), faults (anatomy, structure, interaction,
    physics, rendering: minus the number of faults, -5 to 0), or criteria of your own: a table of columns with what each
    asks for, graded from `low` to `high`; a criterion that need not apply says when the answer is n/a. `think`: the
    model reasons about each criterion before it answers, as UnifiedReward-Think does. An entry of a config chooses its
    `column`; entries with the same parameters share the requests. All other parameters as in `vlm`.
    """

    name = "vlm_rubric"
    card = Card(
        measures="a vision-language model's numbers for several criteria of a rubric, a column for each",
        range=(1.0, 5.0),
        citation="RationalRewards (arXiv:2604.11626); UnifiedReward-Think (arXiv:2505.03318); rubric: faults: "
        "MagicMirror (arXiv:2509.10260)",
        weights="any server's model, or a hub id or folder, for example Qwen/Qwen2.5-VL-7B-Instruct (16 GB)",
        licence="that of the model (Qwen2.5-VL-7B: Apache-2.0)",
        cost="one request an image for all columns; think: true: answers of some hundred tokens",
        exploits="text in the image that addresses the judge; small models give all criteria one number",
    )

    def __init__(
        self,
        rubric: str | Mapping[str, str] = "general",
        server: str | None = None,
        model: str | None = None,
        think: bool = False,
        low: float = 1.0,
        high: float = 5.0,
        key: str = "DIFFRL_VLM_KEY",
        request_timeout: float = 60.0,
        request_retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 16,
        max_tokens: int = 1024,
        device: str | None = None,
        batch_size: int = 16,
        precision: str = "bf16",
    ) -> None:
        self.rubric = _rubric(rubric, low, high)
        self.columns, self.batch_size = tuple(self.rubric.criteria), batch_size
        bounds = (self.rubric.low, self.rubric.high)
        self.card = replace(type(self).card, range=(-bounds[1], -bounds[0]) if self.rubric.faults else bounds)
        intro = (COUNTS if self.rubric.faults else GRADES).format(low=bounds[0], high=bounds[1])
        listed = "\n".join(f"{name}: {words}" for name, words in self.rubric.criteria.items())
        end = END.format(count=len(self.columns), lines="\n".join(f"{name}: X" for name in self.columns))
        self.question = f"{ASK}{intro}\n{listed}\n{THINK if think else ''}{end}"
        local = (max_tokens, device, batch_size, precision)
        self.backend = make_backend(server, model, key, request_timeout, request_retries, backoff, concurrency, *local)
        self.remote, self.device = server is not None, getattr(self.backend, "device", None)

    footprint = staticmethod(bytes_in_process)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B, C) of images (B, 3, H, W) in [0, 1]; NaN where the judge says that a criterion does not apply."""
        pairs = zip(images, prompts, strict=True)
        asked = [Question([image], self.question.replace("{prompt}", prompt), prompt) for image, prompt in pairs]
        parse = partial(read_columns, names=self.columns, low=self.rubric.low, high=self.rubric.high)
        numbers = torch.tensor(self.backend.ask(asked, parse, first=False))
        return -numbers if self.rubric.faults else numbers


def _rubric(given: object, low: float, high: float) -> Rubric:
    if isinstance(given, str):
        if given not in RUBRICS:
            raise UserError(f'vlm_rubric: unknown rubric "{given}"{nearest(given, RUBRICS)}')
        if (low, high) != (1.0, 5.0):
            raise UserError(f'vlm_rubric: low and high are for criteria of your own; "{given}" has its own')
        return RUBRICS[given]
    texts = isinstance(given, Mapping) and all(isinstance(text, str) for pair in given.items() for text in pair)
    if not isinstance(given, Mapping) or not texts or not given:
        raise UserError(f"vlm_rubric: rubric: expected {', '.join(RUBRICS)}, or {{column: what it asks for, ...}}")
    if odd := [name for name in given if not re.fullmatch(r"[A-Za-z][\w -]*", name)]:
        raise UserError(
            f'vlm_rubric: rubric: a column\'s name has letters, digits, spaces, "_" and "-", got "{odd[0]}"'
        )
    if not low < high:
        raise UserError(f"vlm_rubric: low is {low:g} and high is {high:g}")
    return Rubric(dict(given), low=low, high=high)
