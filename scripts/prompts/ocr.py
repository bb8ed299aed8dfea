"""Scenes with a quoted text of 1 to 6 words, for the reward `ocr`; a text of the test split is in no train prompt."""

from __future__ import annotations

from scripts.prompts import Row, Splits
from scripts.prompts.words import Dice, held_out, words

COUNTS = {"train": 9000, "test": 600}
# Patterns of a text by its number of words: A adjective, B one that may follow "are", N noun, P plural, V verb, T time
# of one word, H hour of the day, other words.
PATTERNS = {
    1: ("A", "N", "P", "V"),
    2: ("A N", "A P", "V N", "N T", "V P"),
    3: ("the A N", "V the N", "N and N", "A P T", "N and P", "V A P"),
    4: ("V the A N", "the N of P", "A N and N", "P and P T", "the A N T", "no P after H"),
    5: ("V the A N T", "the A N of P", "A P and A P", "please V the A N", "N and N since 19##"),
    6: ("V the A N and N", "the A N of the N", "all P are B and B", "please V the P and N", "A N and A P T"),
}  # fmt: skip
LISTS = {"A": "adjectives", "B": "adjectives", "H": "hours", "N": "nouns", "P": "plurals", "V": "verbs"}


def text_of(dice: Dice, length: int) -> str:
    """A text of so many words, in lower case."""
    lists = words()["ocr"]
    short = [time for time in lists["times"] if " " not in time]
    used: list[str] = []
    for sign in dice.of(PATTERNS[length]).split():
        word = sign
        if sign in LISTS:
            barred = {*used, *(lists["before_nouns_only"] if sign == "B" else ())}
            word = dice.of([word for word in lists[LISTS[sign]] if word not in barred])
        elif sign == "T":
            word = dice.of(short)
        elif sign.endswith("##"):
            word = f"19{dice.below(90) + 10}"
        used.append(word)
    return " ".join(used)


def scene(dice: Dice, text: str) -> str:
    """A prompt around the text, which stands in double quotes."""
    lists = words()["ocr"]
    carrier, says, style = dice.of(lists["carriers"]), dice.of(lists["says"]), dice.of(lists["styles"])
    forms = (
        f'{carrier} {says} "{text}"',
        f'{style} of {carrier} {says} "{text}"',
        f'{carrier} {says} "{text}", {style}',
    )
    return dice.of(forms)


def splits() -> Splits:
    """{"train", "test"}: lengths in turn, in capitals, title or sentence case."""
    dice = Dice("ocr")
    rows: Splits = {"train": [], "test": []}
    seen: set[str] = set()
    number = 0
    while any(len(rows[split]) < count for split, count in COUNTS.items()):
        number += 1
        plain = text_of(dice, number % 6 + 1)
        split = "test" if held_out(plain, 0.1, "ocr") else "train"
        text = dice.of((plain.upper(), plain.title(), plain.capitalize()))
        prompt = scene(dice, text)
        prompt = prompt[0].upper() + prompt[1:]
        if prompt.lower() in seen or len(rows[split]) == COUNTS[split]:
            continue
        seen.add(prompt.lower())
        row: Row = prompt, {"text": text, "words": number % 6 + 1}
        rows[split].append(row)
    return rows
