"""GenEval (Ghosh et al. 2023, arXiv:2310.11513): six tasks, each image right or wrong; Overall is the mean of tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .items import Answers, Item, Mark, find, objects_of

FILE = "evaluation_metadata.jsonl"


def read(folder: Path) -> list[Item]:
    path = find(folder, f"prompts/{FILE}", FILE)
    entries = objects_of(path, {"tag": str, "include": list, "prompt": str})
    return [Item(entry.pop("prompt"), entry, {"geneval": 1}) for _, entry in entries]


def marks(item: Item, answers: Answers) -> Iterator[Mark]:
    right = [values[0] for values in answers["geneval"]]
    for value in right:
        yield "Task", item.metadata["tag"], value
        yield "All", "correct images", value
    yield "All", "correct prompts (any image)", max(right)
