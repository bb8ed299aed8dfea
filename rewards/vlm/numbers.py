"""Numbers as judges write them: one meaning or none. What could mean two things is `Unreadable`, never a guess.

`at` reads what stands at one place ("4", "4,5", "4/5", "four out of five", "80 %", "4½ stars"), `score` finds the
place: a key of JSON or a tag, "Final score: ", a line "Score: ", "I rate it ", "4 out of 5", a line with a number.
The words that stand around them are in `numbers.yaml`.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from diffrl.resources import table_beside
from diffrl_zoo.vlm.question import Unreadable

_COUNTED = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS = {word: value for value, word in enumerate(_COUNTED)}
_TABLE = table_beside(__file__, "numbers.yaml")
_ANY = {role: f"(?:{'|'.join(words)})" for role, words in _TABLE.items()}
_ANY["counted"] = f"(?:{'|'.join(WORDS)})"
_NAMES, _UNIT = _ANY["names"], _ANY["units"]
_WEAK = re.compile(_ANY["weak"], re.IGNORECASE)
_FINAL = rf"{_ANY['final']}[ -]?"
_BETWEEN = (
    r"""["'”’)\]>*_ ]*(?:/ ?\d+ ?)?(?:\((?![\d.,/ ]+\))[^()\n]*\)|\[[^\[\]\n]*\])?["' ]*"""  # Score (1-5): "Score":
)
_MARK = rf"(?:\s*{_ANY['marks']}\s*|\s*\n\s*|\s+(?=\d)|\s+[-–—]\s+|(?<=[^\x00-\x7f])(?=\d))"
_LABEL = re.compile(rf"{_NAMES}{_BETWEEN}{_MARK}", re.IGNORECASE)
_FINAL_LABEL = re.compile(
    rf"{_FINAL}{_NAMES}{_BETWEEN}{_MARK}|{_ANY['final']}{_BETWEEN}[:=|]\s*|\\boxed *(?=[\d.{{-])", re.IGNORECASE
)
_VERB = re.compile(
    rf"\b{_ANY['verbs']}\b(?: {_ANY['fillers']})* (?=[\d.]|{_ANY['counted']}\b)|(?<=[打给給])(?=\d)|"
    r"\b(?:it|this|that)(?:['’]s| is) an? (?=[\d.]+(?:[.!]?\s*$|/| out of))",
    re.IGNORECASE,
)
_DIGITS = r"(?:\d+(?:[.,]\d+)?|\.\d+)(?:e[+-]?\d+)?"
_WORD = rf"{_ANY['counted']}\b(?:[ ]and[ ]a[ ]half\b)?"
_VALUE = re.compile(
    rf"""[\s"'“‘(\[{{<*_`$~≈]*(?:{_ANY["about"]}\s+)*
    (?P<sign>[-+]|minus)?\s*(?:(?P<number>{_DIGITS})(?:[ ](?P<up>[123])/(?P<down>[234])(?![\d.]))?|(?P<word>{_WORD}))
    ["'”’*_`$]*""",
    re.IGNORECASE | re.VERBOSE,
)
_OF = re.compile(
    rf"""\s*-?(?:{_UNIT}\s*)?[(\[,]?\s*{_ANY["of"]}\s*(?:a\s+)?(?:the\s+)?
    (?:maximum\s+(?:of\s+)?|max\.?\s+|possible\s+|total\s+(?:of\s+)?)*["']?(?P<of>{_DIGITS}|{_WORD})""",
    re.IGNORECASE | re.VERBOSE,
)
_PERCENT = re.compile(rf"\s*{_ANY['percent']}", re.IGNORECASE)
# After a number: a range, a list of numbers, a bound, or what makes it no number at all.
_MORE = re.compile(
    rf"""\s*(?:{_UNIT}\s*)?(?:{_ANY["joins"]}\s*)*
    (?:(?:maybe|perhaps|even|possibly)\s+)?[-+]?(?:{_DIGITS}|{_WORD})(?!\s*[.)]\s+[A-Z])""",
    re.IGNORECASE | re.VERBOSE,
)
_GLUED = re.compile(r"[^\W\d_]|[.,:]\d|\+|\^")
_BOUND = re.compile(rf"{_ANY['bounds']}\s*$", re.IGNORECASE)
_CORRECTION = re.compile(rf"\b{_ANY['corrections']}", re.IGNORECASE)
_TAG = re.compile(rf"<((?:\w+_)?{_NAMES})>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_STARS = re.compile(r"^(?:.*[:=])?[^\w★☆⭐]*([★⭐]+)(☆*)[^\w★☆⭐]*$", re.MULTILINE)
_REFUSAL = re.compile(rf"\b{_ANY['refusals']}\b", re.IGNORECASE)
_PROSE = re.compile(rf"\s+(?!{_UNIT}|{_ANY['prose']})[^\W\d]", re.IGNORECASE)
_LIST = re.compile(r"^\s*(?:[-*•|>#]+\s*|\d+[.)]\s+(?=[^\W\d]))*")


def cleaned(text: str) -> str:
    """The answer in plain signs: NFKC, ASCII digits and minus, no code fences, stars of Markdown."""
    text = re.sub(r"(\d?)([¼-¾⅐-⅞])", lambda m: f"{(int(m[1] or 0)) + unicodedata.numeric(m[2]):g}", text)
    signs = (" " if unicodedata.category(c) == "Zs" else c for c in unicodedata.normalize("NFKC", text))
    text = "".join(str(unicodedata.digit(c)) if unicodedata.category(c) == "Nd" else c for c in signs)
    text = re.sub("[\u200b-\u200f\u2060\ufeff\ufe0f]", "", text).replace("−", "-").replace("٫", ".")
    text = re.sub(r"</?(?:b|i|u|p|em|br|strong|span|div|code|h\d)\b[^<>]*>", " ", text)
    text = re.sub(r"满分 ?\d+ ?分?|\d+ ?[点分](?:満点)?中", " ", text)
    text = re.sub(r"```[\w-]*", "\n", text).replace("`", "")
    text = re.sub(r"\\(?:text|mathrm|mathbf)?\{([^{}]*)\}", r"\1", text.replace("\\frac{", "\\frac {"))
    text = re.sub(r"\*+|(?<!\w)_{1,2}(?=\S)|(?<=\S)_{1,2}(?!\w)", "", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines()).strip()


def number(text: str, low: float, high: float) -> float:
    """A number's digits or word: a comma is the decimal one, or one of thousands where only that is in the range."""
    word = text.lower()
    if word.split()[0] in WORDS:
        return WORDS[word.split()[0]] + (0.5 if "half" in word else 0.0)
    value = float(text.replace(",", "."))
    if re.fullmatch(r"\d{1,3},\d{3}", text):
        many = float(text.replace(",", ""))
        if low <= value <= high and low <= many <= high:
            raise Unreadable(f'"{text}" may be {value:g} or {many:g}')
        value = many if low <= many <= high else value
    return value


def at(text: str, start: int, low: float, high: float) -> tuple[float, int] | None:
    """The number that stands at a place of a cleaned text, and where it ends; None if there is none.

    Raises `Unreadable` for a range, several numbers, a bound, another scale, and what is not from `low` to `high`.
    """
    match = _VALUE.match(text, start)
    if match is None:
        return None
    seen, end = text[start : match.end() + 24].split("\n")[0].strip(), match.end()
    less = "<" in match[0] and ">" not in text[end : end + 12]  # "<4", not "<4>"
    if less or _BOUND.search(text[max(start - 20, 0) : start]):
        raise Unreadable(f'"{seen}" is a bound and no number')
    value = number(match["number"] or match["word"], low, high)
    if "," in (match["number"] or "") and text[match.start("number") - 1 : match.start("number")] == "[":
        raise Unreadable(f'"{seen}" is a list of numbers')
    if match["up"]:
        value += int(match["up"]) / int(match["down"])
    value = -value if (match["sign"] or "+").strip() in ("-", "minus") else value
    share = None
    if (of := _OF.match(text, end)) and (whole := number(of["of"], low, high)):
        end = of.end()
        if whole != high:
            share = value / whole
            if (low, high) != (0.0, 1.0) or not 0.0 <= share <= 1.0:
                raise Unreadable(f'"{seen}" is of {whole:g}, not a number from {low:g} to {high:g}')
    elif percent := _PERCENT.match(text, end):
        end, share = percent.end(), value / 100
        if low != 0.0 or not 0.0 <= share <= 1.0:
            raise Unreadable(f'"{seen}": of a scale from {low:g} to {high:g} a percentage is no number')
    if share is not None:
        value = share * high
    elif _GLUED.match(text, end) and not re.match(_UNIT, text[end:], re.IGNORECASE):
        raise Unreadable(f'"{seen}" is not a number')
    if (more := _MORE.match(text, end)) and "\n" not in more[0]:
        raise Unreadable(f'"{seen}" is a range or several numbers')
    if not low <= value <= high:
        raise Unreadable(f'"{seen}" is not a number from {low:g} to {high:g}')
    return value, end


def only(text: str, low: float, high: float) -> float:
    """The number that is the whole of a short text, such as a value of JSON."""
    found = at(clean := cleaned(text), 0, low, high)
    if found is None or re.search(r"\w", re.sub(_UNIT, "", clean[found[1] :], flags=re.IGNORECASE)):
        raise Unreadable(f'"{text[:80]}" is not a number')
    return found[0]


def objects(text: str) -> Iterator[Any]:
    """Every outermost JSON object or list in the text, Python's spelling included, with text around it or not."""
    start = 0
    while (match := re.compile(r"[{\[]").search(text, start)) is not None:
        start = match.start()
        try:
            value, length = json.JSONDecoder().raw_decode(text[start:])
        except (ValueError, RecursionError):
            value, length = _python(text[start:])
        if length:
            yield value
        start += length or 1


def _python(text: str) -> tuple[Any, int]:
    for close in list(re.finditer(r"[}\]]", text[:4000]))[:16]:
        try:
            return ast.literal_eval(text[: close.end()]), close.end()
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None, 0


def named(value: Any, wanted: Callable[[str], bool]) -> Iterator[Any]:
    """The values of all keys of nested JSON that are `wanted`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if wanted(str(key)):
                yield inner
            else:
                yield from named(inner, wanted)
    elif isinstance(value, list):
        for inner in value:
            yield from named(inner, wanted)


def of_json(value: Any, low: float, high: float) -> float:
    """A number, a text with one, or a list or object around one."""
    while isinstance(value, list | tuple | dict) and len(value) == 1:
        value = next(iter(value.values() if isinstance(value, dict) else value))
    if isinstance(value, dict) and len(inner := list(named(value, lambda key: key.lower() in ("value", "score")))) == 1:
        return of_json(inner[0], low, high)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Unreadable(f"{json.dumps(value, default=str)[:80]} is not a number")
    return only(str(value), low, high)


def agreed(values: Sequence[float], what: str = "") -> float:
    """The one value; `Unreadable` where they differ."""
    if len(set(values)) > 1:
        raise Unreadable(f"{' and '.join(f'{v:g}' for v in dict.fromkeys(values))} contradict each other{what}")
    return values[0]


def score(text: str, low: float, high: float) -> float:
    """The one number from `low` to `high` that an answer gives. The first of the places counts at which there is any.

    Raises `Unreadable` where there is none, or several that differ.
    """
    raw, text = text, cleaned(text)
    bounds = rf"{low:g} ?(?:-|–|to|and) ?{high:g}"  # "on a scale from 1 to 5" is no answer
    scale = rf"(?:on|using)? ?(?:a|the) scale (?:of|from|between) {bounds}|(?:of|from|between) {bounds}(?= ?[:,)])"
    text, places = re.sub(scale, " ", text, flags=re.IGNORECASE), (_structured, _final, _lines, _inside, _rated, _alone)
    for place in places[:3] if _REFUSAL.search(text) else places:  # "I cannot rate 2 people" is none either
        if values := list(place(text if place is not _structured else raw, low, high)):
            return _corrected(agreed(values), text, low, high)
    raise Unreadable("there is no score in it")


def _corrected(value: float, text: str, low: float, high: float) -> float:
    """The value; `Unreadable` where the answer takes it back: "Score: 3. Wait, 4"."""
    if again := _CORRECTION.search(text):
        rest = text[again.end() :].lstrip(" ,.:;-")
        try:
            later = {score(rest, low, high)}
        except Unreadable:
            later = {float(one) for one in re.findall(r"\d+(?:\.\d+)?", rest) if low <= float(one) <= high}
        if later - {value}:
            raise Unreadable(f"{value:g} is taken back")
    return value


def _structured(text: str, low: float, high: float) -> Iterator[float]:
    for _, inner in _TAG.findall(text):
        yield only(inner.strip(" []"), low, high)
    plain = [value for value in objects(unicodedata.normalize("NFKC", text)) if isinstance(value, dict)]
    is_name = re.compile(rf"(?:.*[ _-])?{_NAMES}", re.IGNORECASE).fullmatch
    for value in plain:
        final = list(named(value, lambda key: re.match(_FINAL, key, re.IGNORECASE) is not None))
        exact = list(named(value, lambda key: re.fullmatch(_NAMES, key, re.IGNORECASE) is not None))
        for inner in final or exact or list(named(value, lambda key: is_name(key) is not None)):
            yield of_json(inner, low, high)


def _final(text: str, low: float, high: float) -> Iterator[float]:
    return _after(_FINAL_LABEL.finditer(text), text, low, high)


def _lines(text: str, low: float, high: float) -> Iterator[float]:
    """ "Score: 4" where a line, or what a list has in it, begins so."""
    begin = ("", "my", "the")
    before = ((match, text[text.rfind("\n", 0, match.start()) + 1 : match.start()]) for match in _LABEL.finditer(text))
    yield from _after((m for m, b in before if _LIST.sub("", b).strip("\"'{(<[ ").lower() in begin), text, low, high)


def _inside(text: str, low: float, high: float) -> Iterator[float]:
    return _after(_LABEL.finditer(text), text, low, high)


def _after(labels: Iterable[re.Match[str]], text: str, low: float, high: float) -> Iterator[float]:
    for match in labels:
        found = at(text, match.end(), low, high)
        if found and not (_WEAK.match(match[0]) and _PROSE.match(text, found[1])):
            yield found[0]


def _rated(text: str, low: float, high: float) -> Iterator[float]:
    """ "I give it a 4", "4 out of 5", stars alone."""
    done = [(0, 0)]  # of what is read: in "I rate it 4 out of 5" there is one number
    for match in _VERB.finditer(text):
        if found := at(text, match.end(), low, high):
            done.append((match.end(), found[1]))
            yield found[0]
    for match in re.finditer(rf"(?<![\w.,/]){_DIGITS}|\b{_WORD}", text, re.IGNORECASE):
        of = _OF.match(text, match.end())
        scale = of is not None and of["of"].replace(",", ".").lower() in (f"{high:g}", f"{high:.1f}", *_spelled(high))
        if not scale or any(start <= match.start() < end for start, end in done):
            continue
        if (found := at(text, match.start(), low, high)) and not _PROSE.match(text, found[1]):
            done.append((match.start(), found[1]))
            yield found[0]
    for stars in _STARS.finditer(text):
        if (len(stars[1]) + len(stars[2])) == high or (not stars[2] and low <= len(stars[1]) <= high):
            yield float(len(stars[1]))


def _spelled(value: float) -> list[str]:
    return [word for word, one in WORDS.items() if one == value]


def _alone(text: str, low: float, high: float) -> Iterator[float]:
    """A line that is a number alone; or the one number of an answer that begins with it."""
    for line in (line.lstrip(": ") for line in text.splitlines()):
        match = _VALUE.match(line)
        rest = re.sub(rf"^\s*-?(?:{_UNIT}|%)", "", line[match.end() :], flags=re.IGNORECASE) if match else "x"
        if match and not re.search(r"\w", rest) and len(line) < 40:
            if found := at(line, 0, low, high):
                yield found[0]
            return
    match = _VALUE.match(text)
    rest = text[match.end() :] if match else ""
    if (
        re.match(r"\s*[-–—:(,;]|\s+because\b", rest)
        and not re.search(r"\d", rest)
        and (found := at(text, 0, low, high))
    ):
        yield found[0]
