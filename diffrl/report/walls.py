"""DivGenBench's report: the images of the sets side by side, and the prompts on which diversity was lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffrl.divgen.prompts import DIMENSIONS
from diffrl.divgen.score import METRICS
from diffrl.report.built_page import Page
from diffrl.report.models import PIECES
from diffrl.report.page import figure, picture
from diffrl.report.sections import pick

if TYPE_CHECKING:
    from diffrl.report.divgen import Entry

FEW = 4  # sets from which a table has a row for each
COLUMNS = 6  # images of one row of a wall, at most
KEYWORDS = 6  # keywords of a dimension that are shown as walls
LOST = 6  # prompts that lost most, of each model
TITLES = {"id": "ID", "style": "Style", "layout": "Layout", "tonal": "Tonal", "": "All images"}


def apart(entries: Sequence[Entry], most: int) -> list[Entry]:
    """The first set and those that lost most scores, in their order: a chart or a wall has room for so many."""
    lost = sorted(entries[1:], key=lambda e: -sum(e.verdict(name) == "less" for name in METRICS))
    chosen = {entries[0].name, *(entry.name for entry in lost[: most - 1])}
    return [entry for entry in entries if entry.name in chosen]


def _wall(title: str, tag: str, rows: Iterable[tuple[str, Sequence[Path | None]]]) -> str:
    """Rows of images, one of each set, in columns of the same seed."""
    cells = [(name, [path and picture(path) for path in paths]) for name, paths in rows]
    return figure(title, PIECES.wall(title, cells), tag)


def walls(page: Page, entries: Sequence[Entry]) -> None:
    """By dimension and keyword: images of one prompt with the same seeds, or of several prompts where each has one."""
    shared = [key for key in entries[0].images if all(key in entry.images for entry in entries)]
    for dimension in [*DIMENSIONS, ""]:
        words: dict[str, list[tuple[str, str, str]]] = {}
        for key in shared:
            if key[0] == dimension:
                words.setdefault(key[1], []).append(key)
        note = "Each row is one set of images; a column has the same prompt, and the same seed where seeds are known."
        page.section(f"{TITLES[dimension]}: images", note)
        for word in pick(list(words), KEYWORDS if len(entries) < FEW else 2):
            page.add(_keyword_wall(entries, word, words[word]), "charts")


def _keyword_wall(entries: Sequence[Entry], word: str, keys: Sequence[tuple[str, str, str]]) -> str:
    key = max(keys, key=lambda key: len(entries[0].images[key]))
    members = sorted(entries[0].images[key])
    if len(members) > 1:
        rows = [(entry.name, [entry.images[key].get(m) for m in members[:COLUMNS]]) for entry in entries]
        return _wall(word or key[2], key[2] if word else "", rows)
    chosen = pick(keys, COLUMNS)
    rows = [(entry.name, [next(iter(entry.images[k].values()), None) for k in chosen]) for entry in entries]
    return _wall(word or "images", f"{len(chosen)} prompts", rows)


def lost(page: Page, entries: Sequence[Entry]) -> None:
    """For each set but the first: the prompts whose images became alike most."""
    first, few = entries[0], len(entries) < FEW
    before = {(p["dimension"], p["prompt"]): p for p in first.scores.prompts if "diversity" in p}
    for entry in entries[1:] if few else apart(entries, 4)[1:]:
        changes = []
        for after in entry.scores.prompts:
            key = (after["dimension"], after["prompt"])
            if "diversity" in after and key in before:
                changes.append((after["diversity"] - before[key]["diversity"], key, after))
        down = sum(change < 0 for change, *_ in changes)
        note = f"The images of {down} of {len(changes)} prompts are more alike than {first.name}'s; here most."
        page.section(f"{entry.name}: prompts on which diversity was lost most", note)
        for change, (dimension, text), after in sorted(changes, key=lambda one: one[0])[: LOST if few else 2]:
            path = (dimension, after["keyword"], text)
            if change >= 0 or path not in first.images or path not in entry.images:
                continue
            members = sorted(first.images[path])[:COLUMNS]
            rows = [(one.name, [one.images[path].get(m) for m in members]) for one in (first, entry)]
            values = f"{before[dimension, text]['diversity']:.3f} → {after['diversity']:.3f}"
            page.add(_wall(text, f"{TITLES[dimension]}; diversity {values}", rows), "charts")
