"""DrawBench (Saharia et al. 2022, arXiv:2205.11487) and PartiPrompts (Yu et al. 2022, arXiv:2206.10789): prompts by
category, made for human raters; the field reports preference models on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .items import Answers, Item, Mark, find, rows_of


def read_drawbench(folder: Path) -> list[Item]:
    path = find(folder, "drawbench.csv", "DrawBench.csv", "DrawBench Prompts.csv", "drawbench.tsv")
    rows = rows_of(path, ("Prompts", "Category"))
    return [Item(row["Prompts"].strip(), {"category": row["Category"]}) for _, row in rows]


def read_parti(folder: Path) -> list[Item]:
    rows = rows_of(find(folder, "PartiPrompts.tsv"), ("Prompt", "Category", "Challenge"))
    return [Item(r["Prompt"].strip(), {"category": r["Category"], "challenge": r["Challenge"]}) for _, r in rows]


def marks(item: Item, answers: Answers) -> Iterator[Mark]:
    for name, images in answers.items():
        for (value,) in images:
            yield name, "all prompts", value
            for key in ("category", "challenge"):
                if item.metadata.get(key):
                    yield f"{name}, by {key}", str(item.metadata[key]), value
