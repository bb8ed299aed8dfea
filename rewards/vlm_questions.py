"""What the reward `vlm` asks of one picture in several parts: Soft-TIFA's questions, and lists of test points.

Soft-TIFA (GenEval 2, Kamath et al. 2025, arXiv:2512.16853): of every question the probability, over the whole
vocabulary, that the answer begins with a spelling of the right one; of a picture their arithmetic mean (an estimate of
the parts that are right) or their geometric mean (of all being right).
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from diffrl.rewards.protocol import RewardError
from diffrl_zoo.vlm_backends import Reply, Unreadable

ASK = "{question} Answer in one word."  # the published request; another one gives other numbers
ASK_TOGETHER = "Answer each question in one word. Write one answer a line, in the order of the questions.\n{questions}"
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MEANS = ("geometric", "arithmetic")
_SPACES = " ▁Ġ"
_SCORES = re.compile(r"<score>(.*?)</score>", re.DOTALL)

Pairs = tuple[tuple[str, str], ...]  # of questions and their right answers


def spellings(answer: str) -> tuple[str, ...]:
    """How an answer may begin: as it is, capitalised, a number's digits, each with and without a space before it."""
    word = answer.strip().lower()
    forms = [word, word.capitalize()]
    if word in NUMBERS:
        forms.append(str(NUMBERS.index(word) + 1))
    return tuple(space + form for form in forms for space in ("", " "))


@lru_cache(maxsize=4096)
def known(answer: str) -> tuple[str, ...]:
    """Every spelling that would be an answer at all to the question: of any number, or of yes and no."""
    words = NUMBERS if answer.strip().lower() in NUMBERS else ("yes", "no")
    words = words if answer.strip().lower() in words else (*words, answer)
    return tuple(form for word in words for form in spellings(word))


def probability(first: Sequence[tuple[str, float]], forms: Sequence[str]) -> float:
    """The part of an answer's first token (candidates with probabilities) that is one of the forms."""
    wanted = {form.strip(_SPACES) for form in forms}
    return min(sum(p for token, p in first if token.strip(_SPACES) in wanted), 1.0)


def questions_of(prompt: str, metadata: Mapping[str, Any], reward: str = "vlm") -> Pairs:
    """The questions and answers of a prompt, from `vqa_list` of its metadata ([[question, answer], ...]).

    Raises `RewardError` in the reward's name for what is no such list.
    """
    listed = metadata.get("vqa_list")
    pairs = tuple(tuple(pair) if isinstance(pair, list | tuple) else () for pair in listed or ())
    if not pairs or any(len(p) != 2 or not all(isinstance(w, str) and w.strip() for w in p) for p in pairs):
        text = 'expected `vqa_list`: [["question", "answer"], ...] in its metadata'
        raise RewardError(f'{reward}: the prompt "{prompt}": {text}, got {str(listed)[:80]}')
    return pairs  # type: ignore[return-value]  # two texts each


def soft_answers(replies: Sequence[Reply], pairs: Pairs, least: float) -> list[float]:
    """The probability of the right answer to each question of one picture.

    Raises `Unreadable` if on average less than `least` of the first token is any answer at all.
    """
    firsts = [line for reply in replies for line in (reply.lines or [reply.first])]
    if len(firsts) < len(pairs):
        raise Unreadable(f"{len(firsts)} lines of answers to {len(pairs)} questions: {replies[0].text[:80]!r}")
    rows = [(first, right) for first, (_, right) in zip(firsts, pairs, strict=False)]
    total = sum(probability(first, known(right)) for first, right in rows) / len(rows)
    if total < least:
        seen = ", ".join(f'"{token}" {p:.2g}' for token, p in sorted(firsts[0], key=lambda pair: -pair[1])[:5])
        text = f"on average {total:.3g} of the first token is an answer at all, less than {least:g}"
        raise Unreadable(f"{text} (to the first question: {seen or 'nothing'})")
    return [probability(first, spellings(right)) for first, right in rows]


def mean_of(values: Sequence[float], kind: str) -> float:
    """The arithmetic or the geometric mean; a zero makes the geometric one zero."""
    if kind == "arithmetic":
        return sum(values) / len(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if min(values) > 0.0 else 0.0


def points(reply: Reply, count: int) -> list[float]:
    """UniGenBench's answer: in `<score>[...]</score>` 0 or 1 for each of `count` test points (what is not 1 is 0).

    Raises `Unreadable` for anything else.
    """
    match = _SCORES.search(reply.text)
    try:
        values = ast.literal_eval(match[1].strip()) if match else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        values = None
    if not isinstance(values, list) or len(values) != count or not all(v in (0, 1) for v in values):
        raise Unreadable(f"no <score> with a list of {count} times 0 or 1: {reply.text[-200:]!r}")
    return [float(v) for v in values]
