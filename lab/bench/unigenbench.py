"""UniGenBench (Wang et al. 2025, arXiv:2508.20751; ++: arXiv:2510.18701): 600 English prompts with test points of 10
dimensions and 27 parts of them, each of which holds in an image or does not.

The request to the judge is not ours and not shipped: its words are read from the official script in your copy.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, nearest, read_text

from .items import Answers, Item, Mark, find, parsed, rows_of

FILE, WORDS = "test_prompts_en.csv", "eval_common.py"
TEMPLATE, MEANINGS, SETTINGS = "SYSTEM_PROMPT_EN_TEMPLATE", "EXPLANATION_DICT_EN", "LANG_CONFIGS"
HEADS = ("checkpoint_header", "checkpoint_desc_header")


def read(folder: Path) -> list[Item]:
    path = find(folder, f"data/{FILE}", FILE)
    words = _Words(find(folder, f"eval/src/{WORDS}", WORDS))
    items = []
    for where, row in rows_of(path, ("index", "prompt_en", "sub_dims_en")):
        about = parsed(row["sub_dims_en"], where)
        points, texts = about.get("Testpoints"), about.get("Testpoint Description")
        if not (points and isinstance(points, list) and isinstance(texts, list) and len(points) == len(texts)):
            raise UserError(f"{where}: expected lists of one length under Testpoints and Testpoint Description")
        request = words.request(row["prompt_en"], points, texts, where)
        items.append(Item(row["prompt_en"], {"points": points, "request": request}, {"vlm": len(points)}))
    return items


class _Words:
    """The constants of the official script, which is read and not run."""

    def __init__(self, path: Path) -> None:
        try:
            body = ast.parse(read_text(path)).body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a Python file ({' '.join(str(error).split())[:80]})") from error
        nodes = {node.targets[0].id: node.value for node in body
                 if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}  # fmt: skip
        for name in (TEMPLATE, MEANINGS, SETTINGS):
            if name not in nodes:
                text = f"{path}: no {name}, in which the request's words were looked for"
                raise UserError(text + nearest(name, nodes))
        pairs = [(key.value, value.value) for node in ast.walk(nodes[SETTINGS]) if isinstance(node, ast.Dict)
                 for key, value in zip(node.keys, node.values, strict=True)
                 if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)]  # fmt: skip
        found: dict[Any, Any] = dict(reversed(pairs))  # the first, English ones
        try:
            self.template: str = ast.literal_eval(nodes[TEMPLATE])
            self.meanings: Mapping[str, str] = ast.literal_eval(nodes[MEANINGS])
            self.heads = [found[name] for name in HEADS]
        except (ValueError, KeyError) as error:
            raise UserError(f"{path}: the request's words are not plain text there ({error})") from error

    def request(self, prompt: str, points: list[str], descriptions: list[str], where: str) -> str:
        for point in points:
            if point not in self.meanings:
                raise UserError(f'{where}: unknown test point "{point}"{nearest(point, self.meanings)}')
        lists = (((p, self.meanings[p]) for p in points), zip(points, descriptions, strict=True))
        texts = []
        for head, pairs in zip(self.heads, lists, strict=True):
            texts.append(f"{head}:「" + "".join(f"\n{point}: {text}" for point, text in pairs) + "\n」")
        fields = {"prompt": prompt, "testpoint": points, "explanation": texts[0], "test_explanation": texts[1]}
        return self.template.format(**fields)


def marks(item: Item, answers: Answers) -> Iterator[Mark]:
    for values in answers["vlm"]:
        for point, value in zip(item.metadata["points"], values, strict=True):
            yield "Dimension", point.split("-", 1)[0].strip(), 100.0 * (value == 1)
            if "-" in point:
                yield "Part", point, 100.0 * (value == 1)
