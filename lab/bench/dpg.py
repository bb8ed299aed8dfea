"""DPG-Bench (Hu et al. 2024, arXiv:2403.05135): a graph of yes-or-no questions for every dense prompt.

A question counts only where no question that it depends on was answered with no (after that rule itself was applied,
in the file's order). The score of an image is the share of its questions that count and are answered with yes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from diffrl.errors import UserError

from .items import Answers, Item, Mark, find, rows_of

FILE = "dpg_bench.csv"
COLUMNS = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
YES = 0.5  # the probability from which an answer is one


def read(folder: Path) -> list[Item]:
    prompts: dict[str, tuple[str, dict[int, tuple[str, str, list[int]]]]] = {}
    for number, (where, row) in enumerate(rows_of(find(folder, f"dpg_bench/{FILE}", FILE), COLUMNS)):
        if number == 0:  # as the official script does, for whatever reason
            continue
        try:
            question, parents = int(row["proposition_id"]), [int(part) for part in row["dependency"].split(",")]
        except ValueError as error:
            raise UserError(f"{where}: proposition_id and dependency are not whole numbers ({error})") from error
        category = row["tuple"].split("(")[0].strip()
        asked = prompts.setdefault(row["item_id"], (row["text"], {}))[1]
        asked[question] = (row["question_natural_language"], category, parents)
    return [
        _item(text, asked)
        for text, asked in prompts.values()  # the official script leaves out a prompt where a parent is not there
        if all(parent in asked for _, _, parents in asked.values() for parent in parents if parent)
    ]


def _item(text: str, asked: Mapping[int, tuple[str, str, list[int]]]) -> Item:
    metadata = {
        "vqa_list": [[question, "Yes"] for question, _, _ in asked.values()],
        "categories": [category for _, category, _ in asked.values()],
        "ids": list(asked),
        "parents": [parents for _, _, parents in asked.values()],
    }
    return Item(text, metadata, {"vlm": len(asked)})


def counted(yes: Sequence[bool], ids: Sequence[int], parents: Sequence[Sequence[int]]) -> list[bool]:
    """The answers under the dependency rule."""
    known = dict(zip(ids, yes, strict=True))
    for question, above in zip(ids, parents, strict=True):
        if any(parent and not known[parent] for parent in above):
            known[question] = False
    return list(known.values())


def marks(item: Item, answers: Answers) -> Iterator[Mark]:
    data, yes = item.metadata, [[value > YES for value in values] for values in answers["vlm"]]
    shares = [sum(counted(one, data["ids"], data["parents"])) / len(one) for one in yes]
    yield "DPG-Bench", "score", 100 * sum(shares) / len(shares)
    for category, answer in zip(data["categories"], yes[-1], strict=True):
        yield "Category", category.split("-")[0].strip(), 100.0 * answer
        yield "Detail", category, 100.0 * answer
