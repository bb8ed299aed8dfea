"""Prompt sets that are shipped, one file each: `scripts/prompts` wrote them by seeded grammars from our own word lists.

A set NAME/SPLIT is a list of (text, metadata). The metadata is what the rewards read (`geneval`: tag, include, exclude;
`ocr`: text; `vlm`: vqa_list). Train and test are apart by what the prompts ask for, not only by their words.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, nearest
from diffrl.resources import shipped

Row = tuple[str, dict[str, Any]]

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


def file_of(name: str, split: str) -> Path:
    """The file of a set: compressed lines of JSON, "prompt" and the metadata."""
    return shipped("assets", "prompts", f"{name}_{split}.jsonl.gz")


@functools.cache
def rows(name: str, split: str) -> tuple[Row, ...]:
    """The prompts of a set, in their order, with metadata; all texts of both splits are different."""
    lines = gzip.decompress(file_of(name, split).read_bytes()).decode("utf-8").rstrip("\n").split("\n")
    values = [json.loads(line) for line in lines]
    return tuple((value.pop("prompt"), value) for value in values)
