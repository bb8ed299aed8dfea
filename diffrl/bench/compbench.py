"""T2I-CompBench++ (Huang et al. 2025, TPAMI; arXiv:2307.06350): eight categories of 300 prompts, judged by kind.

A complex prompt's score is the mean of what its kind has: attributes with positions, attributes with actions, or all
three, by the lists of the two kinds that lie beside its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diffrl.bench.items import Answers, Item, Mark, find, read_text

OWED = {
    "color": ("blip_vqa",),
    "shape": ("blip_vqa",),
    "texture": ("blip_vqa",),
    "spatial": ("unidet_2d",),
    "3d_spatial": ("unidet_3d",),
    "numeracy": ("unidet_count",),
    "non_spatial": ("clip",),
    "complex": ("blip_vqa", "unidet_2d", "clip_plain"),
}
KINDS = {"spatial": ("unidet_2d", "blip_vqa"), "action": ("clip_plain", "blip_vqa")}  # of complex prompts


def _lines(folder: Path, name: str) -> list[str]:
    path = find(folder, f"examples/dataset/{name}.txt", f"dataset/{name}.txt", f"{name}.txt")
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]


def _plain(text: str) -> str:
    """As the official script compares: up to the first full stop, in small letters."""
    return text.split(".")[0].lower()


def read(folder: Path) -> list[Item]:
    kinds = {kind: {_plain(line) for line in _lines(folder, f"complex_val_{kind}")} for kind in KINDS}
    items = []
    for category, judges in OWED.items():
        for text in _lines(folder, f"{category}_val"):
            data = {"category": category}
            if category == "complex":
                data["kind"] = next((kind for kind in KINDS if _plain(text) in kinds[kind]), "both")
            items.append(Item(text, data, dict.fromkeys(judges, 1)))
    return items


def marks(item: Item, answers: Answers) -> Iterator[Mark]:
    used = KINDS.get(item.metadata.get("kind", ""), tuple(item.owed))
    for values in zip(*(answers[judge] for judge in used), strict=True):
        yield "Category", item.metadata["category"], sum(value for (value,) in values) / len(used)
