"""Prompt sets that are shipped, one file each: `scripts/prompts` wrote them by seeded grammars from our own word lists.

A set NAME/SPLIT is a list of (text, metadata). The metadata is what the rewards read (`geneval`: tag, include, exclude;
`ocr`: text; `vlm`: vqa_list). Train and test are apart by what the prompts ask for, not only by their words.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from diffrl.errors import UserError, nearest
from diffrl.prompts import Prompt
from diffrl.resources import shipped

SPLITS = ("train", "test")


class ShippedSet:
    """A set `NAME/SPLIT`, by an entry point of `diffrl.prompts`."""

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about
        self.sources = tuple(f"{name}/{split}" for split in SPLITS)

    def split(self, source: str) -> str:
        """Of "NAME/SPLIT"; UserError for an unknown split."""
        _, slash, split = source.partition("/")
        if split not in SPLITS:
            text = f'unknown split "{split}"{nearest(split, SPLITS)}' if slash else f"write {' or '.join(self.sources)}"
            raise UserError(f'prompt set "{source}": {text}')
        return split

    def prompts(self, source: str) -> Sequence[Prompt]:
        return prompts(self.name, self.split(source))


GENEVAL = ShippedSet(
    "geneval", "GenEval's task types over its 80 objects and 10 colours; metadata for the reward geneval"
)
OCR = ShippedSet("ocr", "scenes with a quoted text of 1 to 6 words; metadata for the reward ocr")
GENERAL = ShippedSet("general", "people, animals, things and views, with places, light and styles; no metadata")
COMPOSITIONAL = ShippedSet(
    "compositional", "three bound colours, relations of coloured things, two counts, negations; metadata for geneval"
)
ATOMS = ShippedSet("atoms", "3 to 10 counts, attributes, things, places and actions, with questions for the reward vlm")
ANIMALS = ShippedSet("animals", "a photo of one animal: the 45 of DDPO to train, 30 others to test; no metadata")


def file_of(name: str, split: str) -> Path:
    """The file of a set: compressed lines of JSON, "prompt" and the metadata."""
    return shipped("assets", "prompts", f"{name}_{split}.jsonl.gz")


@functools.cache  # the files are shipped: they stay as they are
def prompts(name: str, split: str) -> tuple[Prompt, ...]:
    """The prompts of a set, in their order, with metadata; all texts of both splits are different."""
    lines = gzip.decompress(file_of(name, split).read_bytes()).decode("utf-8").rstrip("\n").split("\n")
    return tuple(Prompt(value.pop("prompt"), value) for value in map(json.loads, lines))
