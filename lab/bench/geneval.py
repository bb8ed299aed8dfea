"""GenEval (Ghosh et al. 2023, arXiv:2310.11513): six tasks, each image right or wrong; Overall is the mean of tasks.

GenEval 2 (Kamath et al. 2025, arXiv:2512.16853): Soft-TIFA over questions about every object, count, attribute,
relation and action of a prompt; arithmetic means say how many of the parts are right, geometric ones whether all are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from diffrl.errors import UserError

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


def read_second(folder: Path) -> list[Item]:
    items = []
    keys = {"prompt": str, "atom_count": int, "vqa_list": list, "skills": list}
    for where, entry in objects_of(find(folder, "geneval2_data.jsonl"), keys):
        pairs, skills = entry["vqa_list"], entry["skills"]
        if not pairs or len(pairs) != len(skills) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
            raise UserError(f"{where}: expected as many [question, answer] in vqa_list as skills")
        items.append(Item(entry.pop("prompt"), entry, {"vlm": len(pairs)}))
    return items


def marks_second(item: Item, answers: Answers) -> Iterator[Mark]:
    for values in answers["vlm"]:
        whole = 100 * (math.exp(sum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0)
        yield "Soft-TIFA", "AM (parts)", 100 * sum(values) / len(values)
        yield "Soft-TIFA", "GM (whole prompts)", whole
        for skill, value in zip(item.metadata["skills"], values, strict=True):
            yield "Skill (AM)", str(skill), 100 * value
        yield "Atoms (GM)", str(item.metadata["atom_count"]), whole
