"""What the answers of a vision-language model mean. One that cannot be understood is `Unreadable`, never a number.

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
from diffrl_zoo.vlm.question import Reply, Unreadable

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MEANS = ("geometric", "arithmetic")
_SPACES = " ▁Ġ"
_TRIM = f"{_SPACES}\t\n\r\"'`.,:;!*"
_SCORE = re.compile(r"(?:final )?score ?[:=] ?(-?\d+(?:\.\d+)?)(?: ?/ ?(\d+(?:\.\d+)?))?\.?", re.IGNORECASE)
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)")
_WINNER = re.compile(r"winner ?[:=] ?(?:image )?(a|b|tie)\.?", re.IGNORECASE)
_REWRITTEN = re.compile(r"prompt: ?\"?(.*[^\"\s])\"?", re.IGNORECASE)
_POINTS = re.compile(r"<score>(.*?)</score>", re.DOTALL)

Pairs = tuple[tuple[str, str], ...]  # of questions and their right answers
Tokens = Sequence[tuple[str, float]]  # candidates for one token, with their probabilities


def plain(token: str) -> str:
    """A token without spaces, marks and capitals."""
    return token.strip(_TRIM).lower()


def line_starts(tokens: Sequence[str]) -> list[int]:
    """The places of the tokens with which the lines of an answer begin, but for empty lines."""
    starts: list[int] = []
    fresh = True
    for i, token in enumerate(tokens):
        if fresh and token.strip(_TRIM):
            starts.append(i)
            fresh = False
        fresh = fresh or "\n" in token
    return starts


def text_lines(text: str) -> list[str]:
    """Lines that are not empty, without Markdown's stars and repeated spaces."""
    lines = (" ".join(line.replace("*", "").split()) for line in text.splitlines())
    return [line for line in lines if line]


def last_line(reply: Reply, pattern: re.Pattern[str], form: str) -> re.Match[str]:
    """The whole last line by `pattern`; `Unreadable`, which says the `form`, for any other."""
    lines = text_lines(reply.text)
    match = pattern.fullmatch(lines[-1]) if lines else None
    if match is None:
        raise Unreadable(f"the last line is not {form}: {reply.text[-200:]!r}")
    return match


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
    last = last_line(reply, _SCORE, '"Score: X"')
    value, of = float(last[1]), last[2]
    if not low <= value <= high or (of is not None and float(of) != high):
        raise Unreadable(f'"{last[0]}" is not a number from {low:g} to {high:g}')
    for line in text_lines(reply.text):
        if (other := _SCORE.fullmatch(line)) and float(other[1]) != value:
            raise Unreadable(f'"{line}" and "{last[0]}" contradict each other')
    return value


def mean_after(reply: Reply, after: Sequence[str], low: float, high: float) -> float:
    """The mean of the numbers that follow the texts `after`; `Unreadable` if one is not from `low` to `high`."""
    total = 0.0
    for mark in after:
        match = _NUMBER.match(reply.text.partition(mark)[2])
        if match is None or not low <= float(match[1]) <= high:
            raise Unreadable(f'no number from {low:g} to {high:g} after "{mark}": {reply.text[-200:]!r}')
        total += float(match[1])
    return total / len(after)


def read_columns(reply: Reply, names: Sequence[str], low: float, high: float) -> list[float]:
    """The numbers of the answer's last lines, `NAME: X` for each of the names in their order, NaN for `n/a`.

    Raises `Unreadable` for other lines there, and for a number outside `low` to `high`.
    """
    last = text_lines(reply.text)[-len(names) :]
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


def winner(reply: Reply) -> float:
    """1 if the answer's last line is `Winner: A`, 0 for B, 0.5 for a tie; `Unreadable` for any other line."""
    match = last_line(reply, _WINNER, '"Winner: A", "Winner: B" or "Winner: tie"')
    return {"a": 1.0, "b": 0.0, "tie": 0.5}[match[1].lower()]


def rewritten(reply: Reply) -> str:
    """The text after "Prompt:" in the answer's last line; `Unreadable` where there is none."""
    return last_line(reply, _REWRITTEN, '"Prompt: ..."')[1]


def points(reply: Reply, count: int) -> list[float]:
    """UniGenBench's answer: in `<score>[...]</score>` 0 or 1 for each of `count` test points (what is not 1 is 0).

    Raises `Unreadable` for anything else.
    """
    match = _POINTS.search(reply.text)
    try:
        values = ast.literal_eval(match[1].strip()) if match else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        values = None
    if not isinstance(values, list) or len(values) != count or not all(v in (0, 1) for v in values):
        raise Unreadable(f"no <score> with a list of {count} times 0 or 1: {reply.text[-200:]!r}")
    return [float(v) for v in values]


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


def probability(first: Tokens, forms: Sequence[str]) -> float:
    """The part of an answer's first token (candidates with probabilities) that is one of the forms."""
    wanted = {form.strip(_SPACES) for form in forms}
    return min(sum(p for token, p in first if token.strip(_SPACES) in wanted), 1.0)


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
