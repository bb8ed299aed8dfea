"""A vision-language model that judges an image by several criteria in one request: a named column for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice
from diffrl_zoo.vlm.backend import Judge
from diffrl_zoo.vlm.parse import read_columns
from diffrl_zoo.vlm.question import ASK, form_of, of_each


@dataclass(frozen=True)
class Rubric:
    """Criteria by the names of their columns, in words. `faults`: faults are counted, and a score is minus the count.
    low, high: of the numbers that the judge gives."""

    criteria: Mapping[str, str]
    faults: bool = False
    low: float = 1.0
    high: float = 5.0


RUBRICS = {name: Rubric(**given) for name, given in ASK["rubrics"].items()}


@dataclass(eq=False, repr=False, kw_only=True)
class VlmRubric(Judge):
    """A vision-language model's numbers for several criteria, in one request an image: a column for each.

    `rubric`: general (content, text, style, quality, soundness: 1 to 5), faults (anatomy, structure, interaction,
    physics, rendering: minus the number of faults, -5 to 0), or criteria of your own: a table of columns with what each
    asks for, graded from `low` to `high`; a criterion that need not apply says when the answer is n/a. `think`: the
    model reasons about each criterion before it answers, as UnifiedReward-Think does. An entry of a config chooses its
    `column`; entries with the same parameters share the requests. All other parameters as in `vlm`.
    """

    name = "vlm_rubric"
    card = card_of(name)

    rubric: Any = "general"
    think: bool = False
    low: float = 1.0
    high: float = 5.0
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        self.chosen = chosen = _rubric(self.rubric, self.low, self.high)
        self.columns, bounds = tuple(chosen.criteria), (chosen.low, chosen.high)
        self.card = replace(self.card, range=(-bounds[1], -bounds[0]) if chosen.faults else bounds)
        words = ASK["rubric"]
        asked = words["counts" if chosen.faults else "grades"].format(low=bounds[0], high=bounds[1])
        listed = "\n".join(f"{name}: {meaning}" for name, meaning in chosen.criteria.items())
        form = "\n".join(f"{name}: X" for name in self.columns)
        ends = [words["think"]] * self.think + [words["end"].format(count=len(self.columns), lines=form)]
        self.asked = f"{words['intro']} {asked}\n{listed}\n {' '.join(ends)}"
        self.connect()

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B, C) of images (B, 3, H, W) in [0, 1]; NaN where the judge says that a criterion does not apply."""
        parse = partial(read_columns, names=self.columns, low=self.chosen.low, high=self.chosen.high)
        number = {"type": "number", "minimum": self.chosen.low, "maximum": self.chosen.high}
        form = form_of({name: {"anyOf": [number, {"type": "string", "enum": ["n/a"]}]} for name in self.columns})
        rows = self.backend.ask(of_each(images, self.asked, prompts, form), parse, first=False)
        numbers = torch.tensor([[torch.nan] * len(self.columns) if row is None else row for row in rows])
        return -numbers if self.chosen.faults else numbers


def _rubric(given: object, low: float, high: float) -> Rubric:
    if isinstance(given, str):
        check_choice("rubric", given, RUBRICS, "vlm_rubric")
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
