"""What the answers of a vision-language model mean. One that cannot be understood is `Unreadable`, never a number.

Soft-TIFA (GenEval 2, Kamath et al. 2025, arXiv:2512.16853): of every question the probability, over the whole
vocabulary, that the answer begins with a spelling of the right one; of a picture their arithmetic mean (an estimate of
the parts that are right) or their geometric mean (of all being right).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from diffrl.rewards.protocol import RewardError
from diffrl_zoo.vlm import numbers
from diffrl_zoo.vlm.question import Reply, Unreadable

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MEANS = ("geometric", "arithmetic")
_SPACES = " ▁Ġ"
_TRIM = f"{_SPACES}\t\n\r\"'`.,:;!*"
_SIDE = (
    r"(?:(?:the )?(?:image|picture|option)? ?\b(a|b|1|2|first|second)\b(?! tie| draw)(?: (?:image|picture|one))?|"
    r"(?:a )?\b(tie|draw|equal|neither)\b)"
)
_END = (
    r"(?!\s*(?:or|and|/|,)\s*(?:the )?(?:image )?(?:a|b|1|2|not|first|second|tie)\b)(?=\W*$|\W*\n|[^\w ]| because| as)"
)
_WINNER = re.compile(
    r"\b(?:winner|better(?: one| image)?|preferred(?: image)?|choice|verdict|answer)[\"']?(?: is| ?[:=])\s*[\"'(\[]?"
    rf"{_SIDE}{_END}",
    re.IGNORECASE,
)
_SIDE_ALONE = re.compile(rf"{_SIDE}[.!]?", re.IGNORECASE)
_SIDES = {"a": 1.0, "1": 1.0, "first": 1.0, "b": 0.0, "2": 0.0, "second": 0.0}
_REWRITTEN = re.compile(
    r"(?:(?:new|revised|rewritten|improved) )?prompt ?[:：] ?[\"“']?(.*[^\"”'\s])[\"”']?", re.IGNORECASE
)
_POINTS = re.compile(r"<score>(.*?)</score>", re.DOTALL | re.IGNORECASE)
_ABSENT = re.compile(r"n ?/ ?a\b|na\b|not applicable\b|null\b", re.IGNORECASE)

Pairs = tuple[tuple[str, str], ...]  # of questions and their right answers
Tokens = Sequence[tuple[str, float]]  # candidates for one token, with their probabilities


def plain(token: str) -> str:
    """A token without spaces, marks and capitals."""
    return unicodedata.normalize("NFKC", token).strip(_TRIM).lower()


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
    lines = text_lines(reply.said)
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


@contextmanager
def _quoted(text: str) -> Iterator[None]:
    """What is unreadable is told with the answer."""
    try:
        yield
    except Unreadable as error:
        raise Unreadable(f"{error}; the answer: {text[-300:]!r}") from error


def rubric_score(reply: Reply, low: float, high: float) -> float:
    """The answer's number; `Unreadable` where it has none from `low` to `high`, or several (`numbers.score`)."""
    with _quoted(reply.text):
        return numbers.score(reply.said, low, high)


def mean_after(reply: Reply, after: Sequence[str], low: float, high: float) -> float:
    """The mean of the numbers that follow the texts `after`; `Unreadable` if one is not from `low` to `high`."""
    text, total = numbers.cleaned(reply.said), 0.0
    with _quoted(reply.text):
        for mark in after:
            ends = [m.end() for m in re.finditer(re.escape(numbers.cleaned(mark)), text, re.IGNORECASE)]
            found = [value[0] for end in ends if (value := numbers.at(text, end, low, high))]
            if not found:
                raise Unreadable(f'no number from {low:g} to {high:g} after "{mark}"')
            total += numbers.agreed(found)
    return total / len(after)


def read_columns(reply: Reply, names: Sequence[str], low: float, high: float) -> list[float]:
    """The numbers of the columns, NaN for `n/a`: lines `NAME: X`, or JSON with the names as keys, in any order.

    Raises `Unreadable` for a column without a number from `low` to `high`, or with several that differ.
    """
    text = numbers.cleaned(reply.said)
    tables = [value for value in numbers.objects(reply.said) if isinstance(value, dict)]

    def column(name: str) -> float:
        def wanted(key: str) -> bool:
            return key.strip().lower().replace("_", " ") == name.lower().replace("_", " ")

        values = [one for table in tables for one in numbers.named(table, wanted)]
        if values:
            none = values[0] is None or _ABSENT.fullmatch(str(values[0]).strip())
            return float("nan") if none else numbers.agreed([numbers.of_json(one, low, high) for one in values])
        found = []
        label = rf"^[\W\d]*{re.escape(name)}[\"']?(?: ?\([^()\n]*\))?\s*(?:[:=|]|->|\bis\b| [-–] )\s*"
        for line in re.finditer(label, text, re.IGNORECASE | re.MULTILINE):
            if _ABSENT.match(text, line.end()):
                return float("nan")
            if value := numbers.at(text, line.end(), low, high):
                found.append(value[0])
        if not found:
            raise Unreadable(f'there is no "{name}: X"')
        return numbers.agreed(found, f' as "{name}"')

    with _quoted(reply.text):
        return [column(name) for name in names]


def winner(reply: Reply) -> float:
    """1 if the answer's winner is image A, 0 for B, 0.5 for a tie; `Unreadable` for none, or several."""
    text = numbers.cleaned(reply.said)
    is_key = re.compile(r"(?:.*[ _-])?(?:winner|better|preferred|choice|verdict|answer)", re.IGNORECASE).fullmatch
    inner = [v for table in numbers.objects(reply.said) for v in numbers.named(table, lambda k: bool(is_key(k)))]
    matches = [_SIDE_ALONE.fullmatch(str(v).strip()) for v in inner] or [*_WINNER.finditer(text)]
    if not matches:
        matches = [_SIDE_ALONE.fullmatch(line) for line in text.splitlines()[-1:]]
    sides = [0.5 if match[2] else _SIDES[match[1].lower()] for match in matches if match]
    with _quoted(reply.text):
        if not sides or len(sides) < len(matches):
            raise Unreadable('there is no "Winner: A", "Winner: B" or "Winner: tie"')
        return numbers.agreed(sides)


def rewritten(reply: Reply) -> str:
    """The text after "Prompt:" in the answer's last line; `Unreadable` where there is none."""
    return last_line(Reply(reply.said.replace("`", "")), _REWRITTEN, '"Prompt: ..."')[1]


def points(reply: Reply, count: int) -> list[float]:
    """UniGenBench's answer: in `<score>[...]</score>`, or a list alone, 0 or 1 for each of `count` test points.

    Raises `Unreadable` for anything else.
    """
    match = _POINTS.search(reply.said)
    text = unicodedata.normalize("NFKC", match[1] if match else reply.said)
    lists = [text.strip(" \n[]")] if match and "[" not in text else []
    lists += [",".join(map(str, value)) for table in numbers.objects(text) for value in _lists(table)]
    words = [one.strip(" '\"").lower() for one in re.split("[,;]", lists[-1])] if lists else []
    values = [{"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}.get(word) for word in words]
    if len(values) != count or None in values:
        raise Unreadable(f"no <score> with a list of {count} times 0 or 1: {reply.text[-300:]!r}")
    return [value for value in values if value is not None]


def _lists(value: Any) -> list[list[Any]]:
    """The list itself, or those that are an object's values."""
    return [value] if isinstance(value, list) else [v for v in value.values() if isinstance(v, list)]


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
