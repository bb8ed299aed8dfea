"""A vision-language model's judgement of one image and its prompt: yes or no, a rubric's number, or questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError, nearest
from diffrl.rewards.protocol import RewardError, Unscored
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice
from diffrl_zoo.vlm import parse
from diffrl_zoo.vlm.backend import Judge
from diffrl_zoo.vlm.question import ASK, Question, Unreadable, form_of, of_each

MODES = ("yes", "score", "questions", "points")


@dataclass(eq=False, repr=False, kw_only=True)
class Vlm(Judge):
    """A vision-language model's judgement of one image and its prompt.

    `mode`: yes (probability of "yes" to `question`, in [0, 1]), score (a number from `low` to `high` by the rubric in
    `question`), questions (Soft-TIFA: the mean probability of the right answers to the questions in the metadata's
    `vqa_list`, [[question, answer], ...]) or points (the share of the metadata's `points` that hold, by its `request`).
    `question`: what is asked, with {prompt} where the prompt goes (None: a general one); in mode questions {question}.
    `least`: in mode yes, the probability that yes and no must have together; in mode questions, that all answers must
    have on average. `combine`: geometric (all are right: Soft-TIFA GM) or arithmetic (the share that is right: AM).
    `together`: ask all questions of a picture in one request, an answer a line: fewer requests, other numbers than the
    published ones, which ask each alone. In mode score an instruction how the answer must end is
    appended, unless `after` is given: then the question is sent word for word, and the score is the number that follows
    this text in the answer (UnifiedReward: `after: "Final Score:"`; Flow-GRPO divides its 1 to 5 by 5, and gives
    0 where there is no number, which is an error here), or the mean of those that follow several texts (UnifiedReward
    2: `after: ["Alignment Score (1-5):", "Coherence Score (1-5):", "Style Score (1-5):"]`, or one of the three).

    The model is reached as `diffrl_zoo.vlm.backend.Judge` says.
    """

    name = "vlm"
    card = card_of(name)

    mode: str = "yes"
    question: str | None = None
    after: str | Sequence[str] | None = None
    low: float = 1.0
    high: float = 5.0
    least: float = 0.5
    combine: str = "geometric"
    together: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f'vlm: unknown mode "{self.mode}"{nearest(self.mode, MODES)}; vlm_pairs compares')
        check_choice("combine", self.combine, parse.MEANS, "vlm")
        self.asked = self.question or ASK[self.mode if self.mode in ("score", "questions") else "yes"]
        if self.mode == "questions" and "{question}" not in self.asked:
            raise UserError("vlm: `question` needs the text {question} in mode: questions")
        if not self.low < self.high:
            raise UserError(f"vlm: low is {self.low:g} and high is {self.high:g}")
        after = [self.after] if isinstance(self.after, str) else list(self.after or ())
        own = self.mode == "score" and self.question is not None and bool(after) and all(map(str.strip, after))
        if self.after is not None and not own:
            raise UserError("vlm: `after` is a text before the number, for mode: score with a `question` of your own")
        self.form: dict[str, Any] | None = None
        if self.mode == "score":
            self.card = replace(self.card, range=(self.low, self.high))
            bounds: dict[str, Any] = {"low": self.low, "high": self.high}
            self.parse = partial(parse.rubric_score, **bounds)
            if after:
                self.parse = partial(parse.mean_after, after=after, **bounds)
            else:
                self.form = form_of({"score": {"type": "number", "minimum": self.low, "maximum": self.high}})
                self.asked += f' {ASK["end"]} "Score: X", where X is a number from {self.low:g} to {self.high:g}.'
        else:
            self.parse = partial(parse.yes_probability, least=self.least)
        self.connect()

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """In modes questions and points only prompts whose metadata have some."""
        needed = {"questions": "vqa_list", "points": "points"}.get(self.mode)
        return needed is None or bool(metadata.get(needed))

    def rewrite(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
        """The prompts (B,) written anew after a critique of their images (B, 3, H, W), as in RationalRewards."""
        texts = self.backend.ask(of_each(images, ASK["rewrite"], prompts), parse.rewritten, first=False)
        return [prompt if text is None else text for text, prompt in zip(texts, prompts, strict=True)]

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        if self.mode in ("questions", "points"):
            kind = self.combine if self.mode == "questions" else "arithmetic"
            rows = self.answers(images, prompts, metadata)
            return torch.tensor([parse.mean_of(row, kind) if row else torch.nan for row in rows])
        questions = of_each(images, self.asked, prompts, self.form)
        scores = self.backend.ask(questions, self.parse, first=self.mode == "yes")
        return torch.tensor([torch.nan if score is None else score for score in scores])

    def answers(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[list[float]]:
        """In modes questions and points, of each image (B, 3, H, W) in [0, 1]: how right each of its answers is, in
        [0, 1]; an empty list where the judge gave none."""
        if self.mode == "points":
            return self._points(images, prompts, metadata)
        lists = [parse.questions_of(prompt, data) for prompt, data in zip(prompts, metadata, strict=True)]
        asked: list[Question] = []
        for image, prompt, pairs in zip(images, prompts, lists, strict=True):
            asked += self._asked(image, prompt, pairs)
        replies = iter(self.backend.ask(asked, lambda reply: reply, first=True))
        answers = []
        for prompt, pairs in zip(prompts, lists, strict=True):
            mine = [next(replies) for _ in range(1 if self.together else len(pairs))]
            said = [reply for reply in mine if reply is not None]
            try:
                answers.append(parse.soft_answers(said, pairs, self.least) if len(said) == len(mine) else [])
            except Unreadable as error:
                if len(images) == 1:
                    raise Unscored(f'vlm: no usable answer on the prompt "{prompt}": {error}') from error
                answers.append([])
        return answers

    def _asked(self, image: Tensor, prompt: str, pairs: parse.Pairs) -> list[Question]:
        known = [parse.known(right) for _, right in pairs]
        if self.together:
            listed = "\n".join(question for question, _ in pairs)
            words = tuple(dict.fromkeys(form for forms in known for form in forms))
            return [Question([image], ASK["together"].format(questions=listed), prompt, words, len(pairs))]
        texts = [self.asked.replace("{question}", question) for question, _ in pairs]
        return [Question([image], text, prompt, words) for text, words in zip(texts, known, strict=True)]

    def _points(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[list[float]]:
        answers: list[list[float]] = [[]] * len(images)
        rows: dict[int, list[int]] = {}  # images by how many points they have, which the answer must have, too
        for i, (prompt, data) in enumerate(zip(prompts, metadata, strict=True)):
            if not isinstance(data.get("request"), str) or not isinstance(data.get("points"), list | tuple):
                raise RewardError(f'vlm: the prompt "{prompt}": expected `points` and `request` in its metadata')
            rows.setdefault(len(data["points"]), []).append(i)
        for count, chosen in rows.items():
            asked = [Question([images[i]], metadata[i]["request"], prompts[i]) for i in chosen]
            replies = self.backend.ask(asked, partial(parse.points, count=count), first=False)
            for i, values in zip(chosen, replies, strict=True):
                answers[i] = values or []
        return answers
