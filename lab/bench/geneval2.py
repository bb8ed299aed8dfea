"""GenEval 2 (Kamath et al. 2025, arXiv:2512.16853): Soft-TIFA over questions about every object, count, attribute,
relation and action of a prompt; arithmetic means say how many of the parts are right, geometric ones whether all are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from diffrl.errors import UserError

from .items import Answers, Item, Mark, find, objects_of

FILE = "geneval2_data.jsonl"


def read(folder: Path) -> list[Item]:
    items = []
    for where, entry in objects_of(
        find(folder, FILE), {"prompt": str, "atom_count": int, "vqa_list": list, "skills": list}
    ):
        pairs, skills = entry["vqa_list"], entry["skills"]
        if not pairs or len(pairs) != len(skills) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
            raise UserError(f"{where}: expected as many [question, answer] in vqa_list as skills")
        items.append(Item(entry.pop("prompt"), entry, {"vlm": len(pairs)}))
    return items


def marks(item: Item, answers: Answers) -> Iterator[Mark]:
    for values in answers["vlm"]:
        whole = 100 * (math.exp(sum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0)
        yield "Soft-TIFA", "AM (parts)", 100 * sum(values) / len(values)
        yield "Soft-TIFA", "GM (whole prompts)", whole
        for skill, value in zip(item.metadata["skills"], values, strict=True):
            yield "Skill (AM)", str(skill), 100 * value
        yield "Atoms (GM)", str(item.metadata["atom_count"]), whole
