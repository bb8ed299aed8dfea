"""Better than a reference picture of the same prompt, by a vision-language model (RewardDance, arXiv:2509.08826).

The references are drawn once, with `diffrl draw-set`, and lie on the disk: of each prompt's pictures the best by its
scores is what an image is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError, nearest
from diffrl.rewards.protocol import RewardError
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice
from diffrl_zoo.vlm.backend import Judge
from diffrl_zoo.vlm.parse import yes_probability
from diffrl_zoo.vlm.question import ASK, Question


@dataclass(eq=False, repr=False, kw_only=True)
class VlmBetter(Judge):
    """The probability that a vision-language model calls the image better than its prompt's reference picture.

    `references`: an image set, for example the folder that `diffrl draw-set MODEL --rewards vlm_pairs` wrote: of each
    prompt's pictures the one with the highest score `by` (None: the set's only score) is the reference; prompts that it
    lacks are not judged. `order`: both (shown first and shown second, averaged: a judge that prefers a place gains
    nothing) or first (the image, then the reference: half the requests). `question`: with {prompt}, answered by yes or
    no; None: the one of `vlm_pairs`. All other parameters as in `vlm`.
    """

    name = "vlm_better"
    card = card_of(name)

    references: str
    by: str | None = None
    order: str = "both"
    question: str | None = None
    least: float = 0.5
    max_tokens: int = field(default=8, init=False)

    def __post_init__(self) -> None:
        from diffrl.image_sets.latents import Pictures
        from diffrl.image_sets.reading import read_set

        check_choice("order", self.order, ("both", "first"), "vlm_better")
        try:
            self.best = best_of(read_set(self.references).groups, self.by)
        except UserError as error:
            raise UserError(f"vlm_better: references: {error}") from error
        self.asked, self._pictures = self.question or ASK["pair_yes"], Pictures()
        self.connect()

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """To prompts that the set has pictures of."""
        return prompt in self.best

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        size = (images.shape[-1], images.shape[-2])
        try:
            references = [self._pictures(*self.best[prompt], size) for prompt in prompts]
        except UserError as error:
            raise RewardError(f"vlm_better: {error}") from error
        texts = [self.asked.replace("{prompt}", prompt) for prompt in prompts]
        rows = list(zip(images.cpu(), references, texts, prompts, strict=True))
        asked = [Question([image, reference], text, prompt) for image, reference, text, prompt in rows]
        if self.order == "both":
            asked += [Question([reference, image], text, prompt) for image, reference, text, prompt in rows]
        answers = self.backend.ask(asked, partial(yes_probability, least=self.least), first=True)
        wins = torch.tensor([torch.nan if one is None else one for one in answers]).view(-1, len(rows))
        return wins[0] if self.order == "first" else (wins[0] + 1.0 - wins[1]) / 2


def best_of(groups: Sequence[Any], by: str | None) -> dict[str, tuple[Any, str]]:
    """{prompt: (its best picture, where it stands)} of an image set's groups; the first of equal ones.

    Raises `UserError` for a set without such scores, or with several and no `by`.
    """
    names = sorted({name for group in groups for name in group.scores})
    if by is None and len(names) != 1:
        raise UserError(f"the set has {', '.join(names) or 'no scores'}; name one as `by`")
    chosen = by or names[0]
    if chosen not in names:
        raise UserError(f'no scores "{chosen}" in the set{nearest(chosen, names)}')
    best: dict[str, tuple[Any, str]] = {}
    for group in groups:
        scores = [float(s) for s in group.scores.get(chosen, ())]
        known = [i for i, score in enumerate(scores) if score == score]
        if known:
            top = max(known, key=lambda i: scores[i])
            best[group.prompt] = (group.pictures[top], group.where)
    if not best:
        raise UserError(f'no picture of the set has a score "{chosen}"')
    return best
