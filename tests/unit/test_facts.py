"""What recipes say of papers and of their authors' code is what tests/data/facts.csv says, with the source of each.

A row: `source` (repository@commit, or an arXiv number), `checked` (code: read there; title: a paper's own method;
digest: from notes by others), `file`, `where` (function or line), `theirs` (its key or expression), our `key`, the
authors' `value` in our words ("images / 2": half an epoch's), `ours` where the recipe has another value, `recipes`.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.figures.recipe_table import Recipe, Value, recipes

FACTS = Path(__file__).parents[1] / "data" / "facts.csv"
Key = tuple[str, str, str]  # recipe, key, "code" or "paper"


def facts() -> list[tuple[Key, dict[str, str]]]:
    """Each row once for each of its recipes."""
    with FACTS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kind = {True: "paper", False: "code"}
    return [
        ((name, row["key"], kind[row["source"][:5] == "arXiv"]), row) for row in rows for name in row["recipes"].split()
    ]


def labelled(recipe: Recipe) -> list[tuple[Key, Value, bool]]:
    """(recipe, key, kind), the value, and whether its label says that nobody read the source."""
    found = []
    for value in recipe.values:
        label = f"{value.origin} {value.remark}"
        for kind in ("code", "paper"):
            if re.search(rf"\b{kind}\b", label):
                unchecked = re.search(rf"\b{kind}( \(|, )unchecked\b", label) is not None
                found.append(((recipe.name, value.key, kind), value, unchecked))
    return found


def problems(shipped: list[Recipe]) -> list[str]:
    """What labels and facts say differently, a line each."""
    said, wrong = {}, []
    for key, row in facts():
        if key in said:
            wrong.append(f"{key}: two rows")
        said[key] = row
    for recipe in shipped:
        values = {value.key: plain(value) for value in recipe.values}
        for key, value, unchecked in labelled(recipe):
            if (fact := said.pop(key, None)) is None:
                wrong.append(f"{key}: a label without a fact: {value.value}  # {value.origin} {value.remark}")
                continue
            agrees, ours = value.origin == key[2], values[value.key]
            theirs = json.loads(fact["value"])
            if isinstance(theirs, str) and (share := re.fullmatch(r"images / (\d+)", theirs)):
                theirs = values["rollout.groups"] * values["rollout.group_size"] / int(share[1])
            if agrees != (theirs == ours):
                wrong.append(f"{key}: {ours}, labelled {value.origin}; theirs is {theirs}")
            if (not agrees) != bool(fact["ours"]) or (fact["ours"] and json.loads(fact["ours"]) != ours):
                wrong.append(f"{key}: {ours}, and the fact says {fact['ours'] or 'nothing'} of ours")
            if unchecked != (fact["checked"] == "digest"):
                wrong.append(f"{key}: checked: {fact['checked']}, but the label says {value.remark or 'nothing'}")
            if fact["source"].removeprefix("arXiv ").split("@")[0] not in recipe.facts["sources"]:
                wrong.append(f"{key}: {fact['source']} is not among the header's sources")
    return wrong + [f"{key}: a fact without a label" for key in said]


def plain(value: Value) -> Any:
    """As YAML reads it, numbers like 1e-4 included."""
    read = yaml.safe_load(value.value)
    return float(read) if isinstance(read, str) and re.fullmatch(r"[\d.]+e[-+]?\d+", read) else read


def test_every_label_has_its_fact() -> None:
    assert not problems(recipes())


def test_every_fact_says_where_it_was_read() -> None:
    for key, row in facts():
        assert row["checked"] in ("code", "title", "digest"), key
        assert row["checked"] != "code" or (
            row["file"] and row["theirs"] and re.search(r"@[0-9a-f]{7}", row["source"])
        ), key


@pytest.mark.parametrize(
    ("key", "change", "problem"),
    [
        ("grpo.clip", {"value": "1.0e-4"}, "theirs is"),
        ("epochs", {"origin": "code"}, "without a fact"),
        ("rollout.steps", {"origin": "ours"}, "without a label"),
        ("grpo.clip", {"remark": "(unchecked)"}, "but the label says"),
    ],
)
def test_a_changed_value_and_a_new_label_are_found(key: str, change: dict[str, str], problem: str) -> None:
    (recipe,) = [r for r in recipes() if r.name == "sd35/grpo_guard_ocr"]
    values = [replace(value, **change) if value.key == key else value for value in recipe.values]
    changed = replace(recipe, values=values)
    found = problems([changed])
    assert [line for line in found if f"'{key}'" in line and recipe.name in line and problem in line]
