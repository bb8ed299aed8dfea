"""What a text-to-image prompt asks to be written, as people write it."""

from __future__ import annotations

from typing import Any

import pytest

from diffrl_zoo.ocr import Ocr, normalise, quotes


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a 6" ruler beside a sign that says "HELLO"', ["HELLO"]),
        ('a 5\'11" man, a 19" rack and a sign "ROUTE 66" on a 4" pipe', ["ROUTE 66"]),
        ('a 6" ruler', []),
        ('"24" on a cake', ["24"]),
        ("a sign „HALLO“ and “BYE”", ["HALLO", "BYE"]),
        ("une affiche « BONJOUR »", ["BONJOUR"]),
        ("ein Schild »HALT«", ["HALT"]),
        ("一个牌子写着「你好」和『再见』", ["你好", "再见"]),
        ("a door `OPEN`", ["OPEN"]),
        ("a door ``OPEN''", ["OPEN"]),
        ("a door ＂OPEN＂", ["OPEN"]),
        ("a dog's 'BONE' bowl", ["BONE"]),
        ("a sign ‚HALLO‘", ["HALLO"]),
        ("a dog's bowl that isn't full", []),
        ('a sign "DON’T" and “”', ["DON’T"]),
        ("a mug that says 'Don't panic'", ["Don't panic"]),
        ("en skylt med ”HEJ” och ”DÅ”", ["HEJ", "DÅ"]),
        ("a 5” screen and a 6” pipe that say “HI”", ["HI"]),
        ('an 8"x10" photo, 4" × 6", with "DAD"', ["DAD"]),
        ('a sign \\"STOP\\"', ["STOP"]),
        ("text: &quot;R&amp;B&quot;", ["R&B"]),
        ("signs 〝OK〞 and ❝WOW❞", ["OK", "WOW"]),
        ("a sign ＇OK＇", ["OK"]),
        ('a sign "x10"', ["x10"]),
    ],
)
def test_what_is_quoted(prompt: str, texts: list[str]) -> None:
    assert quotes(prompt) == texts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("DON’T", "don't"), ("CAFE\u0301", "café"), ("ＨＥＬＬＯ", "hello"), ("A – B", "a-b"),
        ("ﬁn…", "fin..."), ("\u200fשלום", "שלום"),
    ],
)  # fmt: skip
def test_what_looks_alike_is_alike(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("given", "texts"), [(42, ["42"]), ([1, "B"], ["1", "B"]), ("C", ["C"]), (None, ["Q"]), (2.5, ["2.5"])]
)
def test_the_metadata_s_text_may_be_a_number(given: Any, texts: list[str]) -> None:
    assert Ocr.target('a "Q"', {"text": given}) == texts


def test_text_from_right_to_left_counts_in_either_order() -> None:
    reward = Ocr.__new__(Ocr)
    reward.case, reward.targets, reward.contained = False, "joined", False
    assert reward._score("שלום", ["שלום"]) == reward._score("שלום"[::-1], ["שלום"]) == 1.0
    assert reward._score("olleh", ["hello"]) < 1.0
