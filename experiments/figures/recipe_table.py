"""The site's page of recipes: every value of every shipped recipe and where it comes from, read from the recipes.

A recipe's header has lines `# sources:`, `# differs:`, `# hardware:`, and, where there is something to say, `# time:`
and `# evidence:`; behind every value of it stands `# paper`, `# code` or `# ours`, with a remark in brackets or behind
a colon; `(unchecked)` where the source could not be read. tests/data/facts.csv has what the sources say. In the
playground's recipes, whose sizes are all ours, a header's `# values: ours, unless a line says otherwise` stands for
every value without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from diffrl.resources import shipped_configs

ROOT = Path(__file__).resolve().parents[2]
FACTS = ("sources", "differs", "hardware", "time", "evidence")
# What a recipe without the line is.
UNSAID = {
    "time": "not measured",
    "evidence": "not verified; tried: `--dry-run` and `doctor` on a tiny pipeline of its classes",
}
ORIGINS = ("paper", "code", "ours")
INTRO = """# Recipes

Made from `configs/`. Run one with `diffrl train NAME`; it needs
the weights and the hardware that it names, and no other file: the prompts are shipped (`diffrl prompts list`). Those on
[image sets](methods/sets.md) need one: the header says how it is drawn or fetched.

A recipe has only what differs from the defaults (`diffrl train --help-config`) and from its model's preset (resolution,
precision and evaluation: `diffrl/config/presets.py`); a run's `config.yaml` has every value.

**Evidence** says what is known of a recipe. *not verified*: no training of the real model with it is known; beside it
stands what was tried (`tests/integration/test_recipes.py` does it with each; rewards and teachers are stand-ins).
*runs*: somebody has trained, for a few epochs at least. *reproduces*: a published figure was reached, and the file says
which. Before you compare, read [where paper, code and we differ](../experiments/notebook/differences.md).

**Source** of a value: *code* (what the authors released, where there is such), *paper* or *ours*. *(unchecked)*: known
from notes by others. `tests/data/facts.csv` in the repository names repository, file and key of each value of theirs.
"""


@dataclass
class Value:
    """One key of a recipe."""

    key: str
    value: str
    origin: str  # "paper", "code", "ours"; empty: none is given
    remark: str


@dataclass
class Recipe:
    """A recipe's title, the facts of its header, and its values."""

    name: str
    title: str
    facts: dict[str, str] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)


def recipes() -> list[Recipe]:
    """All, by name."""
    return [read(path) for path in shipped_configs()]


def read(path: Path) -> Recipe:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    recipe, unsaid = Recipe(f"{path.parent.name}/{path.stem}", lines[0].lstrip("# ")), ""
    for line in lines[1:]:
        if match := re.match(rf"# values: ({'|'.join(ORIGINS)}), unless a line says otherwise$", line):
            unsaid = match[1]
        if match := re.match(rf"# ({'|'.join(FACTS)}): (.*)", line):
            recipe.facts[match[1]] = " ".join(filter(None, [recipe.facts.get(match[1]), match[2]]))
    recipe.facts = {**UNSAID, **recipe.facts}
    for key, node in _leaves(yaml.compose(text)):
        origin, remark = _comment(lines[node.end_mark.line])
        value = text[node.start_mark.index : node.end_mark.index].strip()
        recipe.values.append(Value(key, value, origin or unsaid, remark))
    return recipe


def _leaves(node: yaml.Node | None, path: str = "") -> Iterator[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode) or not node.value:
        assert node is not None, "an empty recipe"
        yield path, node
        return
    for key, value in node.value:
        yield from _leaves(value, f"{path}.{key.value}".lstrip("."))


def _comment(line: str) -> tuple[str, str]:
    """(origin, remark) of what stands behind a value."""
    match = re.search(r"\s# (.*)$", line)
    if not match:
        return "", ""
    origin, _, remark = match[1].partition(": ")
    head, bracket, rest = origin.partition(" (")
    if not set(head.split(", ")) <= set(ORIGINS):
        return "", match[1]
    return head, f"{bracket.strip()}{rest}: {remark}" if bracket and remark else f"({rest}" if bracket else remark


def page(recipes: list[Recipe]) -> str:
    """The whole page."""
    parts = [INTRO, "| recipe | what | evidence |\n| --- | --- | --- |"]
    for recipe in recipes:
        anchor = recipe.name.replace("/", "").replace("_", "_")
        parts.append(f"| [{recipe.name}](#{anchor}) | {recipe.title} | {recipe.facts.get('evidence', '')} |")
    for recipe in recipes:
        parts += ["", f"## {recipe.name}", "", recipe.title, ""]
        parts += [f"- **{name}**: {_escaped(text)}" for name, text in recipe.facts.items() if name != "evidence"]
        parts += ["", "| key | value | source | remark |", "| --- | --- | --- | --- |"]
        for value in recipe.values:
            parts.append(f"| {value.key} | {_escaped(value.value)} | {value.origin} | {_escaped(value.remark)} |")
    return "\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
