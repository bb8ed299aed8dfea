"""A vision-language model as the judge: yes or no, a rubric's number, questions, or comparisons inside a group.

The model answers on an OpenAI-compatible server or in process (`vlm_backends`). An answer that cannot be understood is
never a number: it is asked for again, and then an error that stops the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError, nearest
from diffrl.rewards.protocol import Card, RewardError
from diffrl_zoo.vlm_backends import Question, Reply, Unreadable, bytes_in_process, make_backend, plain
from diffrl_zoo.vlm_questions import (
    ASK,
    ASK_TOGETHER,
    MEANS,
    Pairs,
    known,
    mean_of,
    points,
    questions_of,
    soft_answers,
)

ASK_YES = 'Does this image show exactly what this prompt asks for: "{prompt}"? Answer with yes or no only.'
ASK_SCORE = (
    'The image was made for this prompt: "{prompt}". Judge how well it shows what the prompt asks for (objects, '
    "counts, colours, relations, text), and how well it is made (no distorted, blurred or broken parts)."
)
ASK_PAIR = (
    'Two images were made for this prompt: "{prompt}". The first is image A, the second is image B. Which one is '
    "better, judged by how well it shows what the prompt asks for, and then by how well it is made?"
)
ASK_PAIR_YES = (
    'Two images were made for this prompt: "{prompt}". Is the first image better than the second, judged by how well '
    "it shows what the prompt asks for, and then by how well it is made? Answer with yes or no only."
)
_END = " Think briefly. The last line of your answer must be exactly "
_SCORE = re.compile(r"(?:final )?score ?[:=] ?(-?\d+(?:\.\d+)?)(?: ?/ ?(\d+(?:\.\d+)?))?\.?", re.IGNORECASE)
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)")
_WINNER = re.compile(r"winner ?[:=] ?(?:image )?(a|b|tie)\.?", re.IGNORECASE)
ASK_REWRITE = (
    'This image was made for the prompt "{prompt}". Name briefly what of the prompt it does not show, and what of it '
    "is made badly. Then write the prompt anew, with the same meaning and about as long, so that a text-to-image model "
    'gets this right. The last line of your answer must be exactly "Prompt: ...", with the new prompt.'
)
_REWRITTEN = re.compile(r"prompt: ?\"?(.*[^\"\s])\"?", re.IGNORECASE)
MODES = ("yes", "score", "questions", "points")
_WEIGHTS = "any server's model, or a hub id or folder, for example Qwen/Qwen2.5-VL-7B-Instruct (16 GB)"


def yes_probability(reply: Reply, least: float) -> float:
    """P(yes) / (P(yes) + P(no)) of the answer's first token, in [0, 1].

    Raises `Unreadable` if yes and no together are less probable than `least`: the model answers something else.
    """
    yes, no = (sum(p for token, p in reply.first if plain(token) == word) for word in ("yes", "no"))
    if yes + no < least or yes + no == 0.0:
        seen = ", ".join(f'"{token}" {p:.2g}' for token, p in reply.first[:5])
        raise Unreadable(f"yes and no have the probability {yes + no:.3g} together, less than {least:g} ({seen})")
    return yes / (yes + no)


def rubric_score(reply: Reply, low: float, high: float) -> float:
    """The number of the answer's last line, `Score: X` or `Score: X/HIGH`, without other words.

    Raises `Unreadable` for any other last line, a number outside `low` to `high`, and for lines that contradict it.
    """
    lines = _lines(reply.text)
    last = _SCORE.fullmatch(lines[-1]) if lines else None
    if last is None:
        raise Unreadable(f'the last line is not "Score: X": {reply.text[-200:]!r}')
    value, of = float(last[1]), last[2]
    if not low <= value <= high or (of is not None and float(of) != high):
        raise Unreadable(f'"{lines[-1]}" is not a number from {low:g} to {high:g}')
    if others := [line for line in lines if (m := _SCORE.fullmatch(line)) and float(m[1]) != value]:
        raise Unreadable(f'"{others[0]}" and "{lines[-1]}" contradict each other')
    return value


def number_after(reply: Reply, after: str, low: float, high: float) -> float:
    """The number that follows the first `after` in the answer; `Unreadable` if there is none from `low` to `high`."""
    match = _NUMBER.match(reply.text.partition(after)[2])
    if match is None or not low <= float(match[1]) <= high:
        raise Unreadable(f'no number from {low:g} to {high:g} after "{after}": {reply.text[-200:]!r}')
    return float(match[1])


def mean_after(reply: Reply, after: Sequence[str], low: float, high: float) -> float:
    """The mean of the numbers that follow each of the texts `after`."""
    return sum(number_after(reply, text, low, high) for text in after) / len(after)


def rewritten(reply: Reply) -> str:
    """The text after "Prompt:" in the answer's last line; `Unreadable` where there is none."""
    lines = _lines(reply.text)
    match = _REWRITTEN.fullmatch(lines[-1]) if lines else None
    if match is None:
        raise Unreadable(f'the last line is not "Prompt: ...": {reply.text[-200:]!r}')
    return match[1]


def winner(reply: Reply) -> float:
    """1 if the answer's last line is `Winner: A`, 0 for B, 0.5 for a tie; `Unreadable` for any other line."""
    lines = _lines(reply.text)
    match = _WINNER.fullmatch(lines[-1]) if lines else None
    if match is None:
        raise Unreadable(f'the last line is not "Winner: A", "Winner: B" or "Winner: tie": {reply.text[-200:]!r}')
    return {"a": 1.0, "b": 0.0, "tie": 0.5}[match[1].lower()]


def win_rates(wins: Mapping[tuple[int, int], float], count: int) -> Tensor:
    """(count,) mean result of every image against the others: `wins[i, j]` is 1 where i, shown first, beat j."""
    rates = torch.zeros(count, dtype=torch.float64)
    for (i, j), win in wins.items():
        rates[i] += win
        rates[j] += 1.0 - win
    return (rates / (2 * (count - 1))).float()


def tournament(
    ask: Callable[[Sequence[tuple[int, int]]], Mapping[tuple[int, int], float]], count: int, seed: str
) -> Tensor:
    """(count,) win rates by a knockout of count - 1 pairs: the share of the others that went out earlier, ties half.

    `ask` gets a round's pairs in both orders and gives each first one's result. The first round's pairs are drawn from
    `seed`; of an odd number the last one waits. A drawn pair is won by who stands first. Single elimination
    (ArenaRL) finds the best and the halves, not the order within them.
    """
    draw = torch.Generator().manual_seed(int.from_bytes(sha256(seed.encode()).digest()[:8], "big") >> 1)
    left, rounds, number = torch.randperm(count, generator=draw).tolist(), torch.zeros(count), 0
    while len(left) > 1:
        pairs = list(zip(left[0::2], left[1::2], strict=False))
        results = ask([order for i, j in pairs for order in ((i, j), (j, i))])
        winners = [i if results[i, j] + 1.0 - results[j, i] >= 1.0 else j for i, j in pairs]
        left, number = winners + left[2 * len(pairs) :], number + 1
        rounds[left] = number
    earlier, same = rounds[:, None] > rounds, rounds[:, None] == rounds
    return (earlier.sum(1) + 0.5 * (same.sum(1) - 1)) / (count - 1)


def _lines(text: str) -> list[str]:
    """Lines that are not empty, without Markdown's stars and repeated spaces."""
    lines = (" ".join(line.replace("*", "").split()) for line in text.splitlines())
    return [line for line in lines if line]


def _as_it_is(reply: Reply) -> Reply:
    return reply


class Vlm:
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

    `server`: URL of an OpenAI-compatible server, ending in /v1, with `model` the name that it serves (None: its only
    one), `key` the environment variable with its token (DIFFRL_..., or one that you allowed), `concurrency` requests at
    once. A request fails after `request_timeout` seconds of silence, and is sent again `request_retries` times, the
    first after `backoff` seconds and each of the next after twice the wait before. Without `server`, `model` is a hub
    id or folder for transformers, on `device`, in `precision`. `batch_size`: images a call (for transformers: a
    forward). `max_tokens`: of an answer in mode score.
    """

    name = "vlm"
    card = Card(
        measures="a vision-language model's answer about image and prompt: probability of yes (mode: yes), a number "
        "by a rubric (mode: score), or of right answers to the metadata's questions (mode: questions; points)",
        range=(0.0, 1.0),
        citation="RewardDance (Wu et al. 2025, arXiv:2509.08826); VQAScore (Lin et al. 2024, arXiv:2404.01291); "
        "mode: questions: GenEval 2 (Kamath et al. 2025, arXiv:2512.16853)",
        weights=_WEIGHTS,
        licence="that of the model (Qwen2.5-VL-7B: Apache-2.0)",
        cost="one request an image (mode: questions: one a question, or together: true); in process the whole model "
        "(7 B: 16 GB in bf16), a forward an image in mode: yes, a question in mode: questions",
        exploits="text in the image that addresses the judge; small models overlook counts and broken parts",
    )

    def __init__(
        self,
        mode: str = "yes",
        server: str | None = None,
        model: str | None = None,
        question: str | None = None,
        after: str | Sequence[str] | None = None,
        low: float = 1.0,
        high: float = 5.0,
        least: float = 0.5,
        key: str = "DIFFRL_VLM_KEY",
        request_timeout: float = 60.0,
        request_retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 16,
        max_tokens: int = 512,
        device: str | None = None,
        batch_size: int = 16,
        precision: str = "bf16",
        combine: str = "geometric",
        together: bool = False,
    ) -> None:
        if mode not in MODES:
            raise UserError(f'vlm: unknown mode "{mode}"{nearest(mode, MODES)}; vlm_pairs compares')
        if combine not in MEANS:
            raise UserError(f'vlm: unknown combine "{combine}"{nearest(combine, MEANS)}')
        if mode == "questions" and "{question}" not in (question or ASK):
            raise UserError("vlm: `question` needs the text {question} in mode: questions")
        if not low < high:
            raise UserError(f"vlm: low is {low:g} and high is {high:g}")
        marks = () if after is None else (after,) if isinstance(after, str) else tuple(after)
        if after is not None and (mode != "score" or question is None or not all(map(str.strip, marks)) or not marks):
            raise UserError("vlm: `after` is a text before the number, for mode: score with a `question` of your own")
        self.mode, self.batch_size, self.after = mode, batch_size, marks
        self.low, self.high, self.least = low, high, least
        self.combine, self.together = combine, together
        self.question = question or {"score": ASK_SCORE, "questions": ASK}.get(mode, ASK_YES)
        if mode == "score" and not marks:
            self.question += f'{_END}"Score: X", where X is a number from {low:g} to {high:g}.'
        if mode == "score":
            self.card = replace(type(self).card, range=(low, high))
        local = (max_tokens, device, batch_size, precision)
        calls = (request_timeout, request_retries, backoff, concurrency)
        self.backend = make_backend(server, model, key, *calls, *local)
        self.remote, self.device = server is not None, getattr(self.backend, "device", None)

    footprint = staticmethod(bytes_in_process)

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """In modes questions and points only prompts whose metadata have some."""
        needed = {"questions": "vqa_list", "points": "points"}.get(self.mode)
        return needed is None or bool(metadata.get(needed))

    def rewrite(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
        """The prompts (B,) written anew after a critique of their images (B, 3, H, W), as in RationalRewards."""
        pairs = zip(images, prompts, strict=True)
        asked = [Question([image], ASK_REWRITE.replace("{prompt}", prompt), prompt) for image, prompt in pairs]
        return self.backend.ask(asked, rewritten, first=False)

    def answers(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[list[float]]:
        """In modes questions and points, of each image (B, 3, H, W) in [0, 1]: how right each of its answers is, in
        [0, 1]."""
        if self.mode == "points":
            return self._points(images, prompts, metadata)
        lists = [questions_of(prompt, data) for prompt, data in zip(prompts, metadata, strict=True)]
        asked: list[Question] = []
        for image, prompt, pairs in zip(images, prompts, lists, strict=True):
            asked += self._asked(image, prompt, pairs)
        replies = iter(self.backend.ask(asked, _as_it_is, first=True))
        answers = []
        for prompt, pairs in zip(prompts, lists, strict=True):
            mine = [next(replies) for _ in range(1 if self.together else len(pairs))]
            try:
                answers.append(soft_answers(mine, pairs, self.least))
            except Unreadable as error:
                raise RewardError(f'vlm: no usable answer on the prompt "{prompt}": {error}') from error
        return answers

    def _asked(self, image: Tensor, prompt: str, pairs: Pairs) -> list[Question]:
        if self.together:
            listed = "\n".join(question for question, _ in pairs)
            words = tuple(dict.fromkeys(form for _, right in pairs for form in known(right)))
            return [Question([image], ASK_TOGETHER.format(questions=listed), prompt, words, len(pairs))]
        return [Question([image], self.question.replace("{question}", q), prompt, known(right)) for q, right in pairs]

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
            replies = self.backend.ask(asked, partial(points, count=count), first=False)
            for i, values in zip(chosen, replies, strict=True):
                answers[i] = values
        return answers

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        if self.mode in ("questions", "points"):
            kind = self.combine if self.mode == "questions" else "arithmetic"
            return torch.tensor([mean_of(row, kind) for row in self.answers(images, prompts, metadata)])
        pairs = zip(images, prompts, strict=True)
        questions = [Question([image], self.question.replace("{prompt}", prompt), prompt) for image, prompt in pairs]
        if self.mode == "yes":
            return torch.tensor(self.backend.ask(questions, partial(yes_probability, least=self.least), first=True))
        parse = partial(rubric_score, low=self.low, high=self.high)
        if self.after:
            parse = partial(mean_after, after=self.after, low=self.low, high=self.high)
        return torch.tensor(self.backend.ask(questions, parse, first=False))


class VlmPairs:
    """Win rate of every image against all others of its group, each pair shown in both orders; group-wise.

    `mode`: answer (the model names the winner or a tie) or yes (probability that it says yes to "is the first better",
    a soft win). `compare`: all (n (n - 1) requests for a group of n images), or tournament (2 (n - 1): a knockout whose
    pairs are drawn from the prompt, each shown in both orders). All other parameters as in `vlm`.
    """

    name = "vlm_pairs"
    groupwise = True
    card = Card(
        measures="share of the comparisons with the other images of its prompt's group that the image wins",
        range=(0.0, 1.0),
        citation="Pref-GRPO (Wang et al. 2025, arXiv:2508.20751); mode: yes: RewardDance (arXiv:2509.08826)",
        weights=_WEIGHTS,
        licence="that of the model (Qwen2.5-VL-7B: Apache-2.0)",
        cost="n (n - 1) requests with two images for a group of n (552 for 24); compare: tournament: 2 (n - 1) (46)",
        exploits="says nothing about the group's level: all images may get worse together; watch an absolute reward",
    )

    def __init__(
        self,
        mode: str = "answer",
        server: str | None = None,
        model: str | None = None,
        question: str | None = None,
        compare: str = "all",
        least: float = 0.5,
        key: str = "DIFFRL_VLM_KEY",
        request_timeout: float = 60.0,
        request_retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 16,
        max_tokens: int = 512,
        device: str | None = None,
        batch_size: int = 16,
        precision: str = "bf16",
    ) -> None:
        if mode not in ("answer", "yes"):
            raise UserError(f'vlm_pairs: unknown mode "{mode}"{nearest(mode, ("answer", "yes"))}')
        if compare not in ("all", "tournament"):
            raise UserError(f'vlm_pairs: unknown compare "{compare}"{nearest(compare, ("all", "tournament"))}')
        self.mode, self.compare, self.batch_size, self.least = mode, compare, batch_size, least
        self.question = question or (ASK_PAIR if mode == "answer" else ASK_PAIR_YES)
        if mode == "answer":
            self.question += f'{_END}"Winner: A", "Winner: B" or "Winner: tie".'
        local = (max_tokens, device, batch_size, precision)
        calls = (request_timeout, request_retries, backoff, concurrency)
        self.backend = make_backend(server, model, key, *calls, *local)
        self.remote, self.device = server is not None, getattr(self.backend, "device", None)

    footprint = staticmethod(bytes_in_process)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Win rates (n,) in [0, 1] of the images (n, 3, H, W) in [0, 1] of one group."""
        if len(images) < 2:
            raise RewardError("vlm_pairs: a group of one image has no pairs; set rollout.group_size to 2 or more")
        text, rows = self.question.replace("{prompt}", prompts[0]), list(images)
        parse = winner if self.mode == "answer" else partial(yes_probability, least=self.least)

        def ask(order: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
            questions = [Question([rows[i], rows[j]], text, prompts[0]) for i, j in order]
            return dict(zip(order, self.backend.ask(questions, parse, first=self.mode == "yes"), strict=True))

        if self.compare == "tournament":
            return tournament(ask, len(images), prompts[0])
        return win_rates(ask(list(permutations(range(len(images)), 2))), len(images))
