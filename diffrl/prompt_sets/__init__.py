"""Prompt sets that are shipped: made by seeded grammars from our own word lists, the same on every machine.

A set NAME/SPLIT is a list of (text, metadata). The metadata is what the rewards read (`geneval`: tag, include, exclude;
`ocr`: text; `vlm`: vqa_list). Train and test are apart by what the prompts ask for, not only by their words: see each
grammar.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from diffrl.errors import UserError, nearest

Row = tuple[str, dict[str, Any]]
Splits = dict[str, list[Row]]

SPLITS = ("train", "test")
SETS = {
    "geneval": "GenEval's task types over its 80 objects and 10 colours; metadata for the reward geneval",
    "ocr": "scenes with a quoted text of 1 to 6 words; metadata for the reward ocr",
    "general": "people, animals, things and views, with places, light and styles; no metadata",
    "compositional": "three bound colours, relations of coloured things, two counts, negations; metadata for geneval",
    "atoms": "3 to 10 counts, attributes, things, places and actions, with questions for the reward vlm",
    "animals": "a photo of one animal: the 45 of DDPO to train, 30 others to test; no metadata",
}


def set_name(source: str) -> tuple[str, str] | None:
    """(name, split) of a shipped set `NAME/SPLIT`, None for what is none; UserError for an unknown split of one."""
    name, slash, split = source.partition("/")
    if name not in SETS or source.endswith((".txt", ".jsonl")):
        return None
    if split not in SPLITS:
        text = f'unknown split "{split}"{nearest(split, SPLITS)}' if slash else f"write {name}/train or {name}/test"
        raise UserError(f'prompt set "{source}": {text}')
    return name, split


@functools.cache
def rows(name: str, split: str) -> tuple[Row, ...]:
    """The prompts of a set, in their order, with metadata; all texts of both splits are different."""
    from diffrl.prompt_sets import atoms, compositional, general, geneval, ocr

    grammars: dict[str, Callable[[], Splits]] = {
        "geneval": geneval.splits,
        "ocr": ocr.splits,
        "general": general.splits,
        "compositional": compositional.splits,
        "atoms": atoms.splits,
        "animals": general.animals,
    }
    return tuple(grammars[name]()[split])
