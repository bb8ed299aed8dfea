"""The page of `diffrl search`: scores over the budget, and each prompt's first image beside its best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.records.progress import number
from diffrl.report.built_page import Page
from diffrl.report.data import PALETTE
from diffrl.report.plots import Axis, Line

SHOWN = 16  # prompts whose images are shown
NOTE = (
    "Means over the prompts of the best image so far, by the rewards that are searched for. A value that is only "
    "watched is of the same images: where it falls while the rewards rise, the search finds what fools them."
)


def write_search(folder: Path, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `FOLDER/report.html` of a finished search: what its search.json and search.jsonl hold."""
    arms: Mapping[str, Any] = facts["arms"]
    names = [name for name in next(iter(arms.values()))["curve"][0] if name != "forwards"]
    page = Page(f"{folder.resolve().name}: search", f"Search: {', '.join(facts['trained_on'])}").lead(_lead(facts))
    page.section("Over the budget", NOTE)
    for name in names:
        _curves(page, facts, name)
    cells = []
    for arm, one in arms.items():
        first, last = one["curve"][0], one["curve"][-1]
        cells.append([arm, f"{one['images']:,}", *(f"{number(first[name])} → {number(last[name])}" for name in names)])
    page.section("From the first image to the best").table(cells, ["", "images", *names])
    page.section("Images", "The first image that was drawn, and the best.")
    for prompt in list(dict.fromkeys(row["prompt"] for row in rows))[:SHOWN]:
        page.strip(prompt, _images(folder, [row for row in rows if row["prompt"] == prompt]))
    return page.write(folder / "report.html")


def _lead(facts: Mapping[str, Any]) -> str:
    lora = f" with {facts['lora']}" if facts["lora"] else ""
    text = f"{facts['model']}{lora}, {facts['prompts_count']} prompts, {facts['budget']:,} network forwards for each"
    used = ", ".join(f"{arm} {one['forwards_spent']:,}" for arm, one in facts["arms"].items())
    return f"{text} (spent: {used}; guidance counts twice where it takes a second row)."


def _curves(page: Page, facts: Mapping[str, Any], name: str) -> None:
    lines = []
    for i, (arm, one) in enumerate(facts["arms"].items()):
        if points := [(point["forwards"], point[name]) for point in one["curve"] if point[name] is not None]:
            xs, ys = zip(*points, strict=True)
            lines.append(Line(xs, ys, f"c{i % PALETTE}", arm))
    tag = "searched for" if name in facts["trained_on"] else "watched"
    tag += ", lower is better" if name in facts["lower_is_better"] else ""
    axis = Axis(x="network forwards for a prompt", y="mean score", description=f"{name} against forwards")
    page.chart(name, lines, axis, tag)


def _images(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Path, str]]:
    cells = []
    for row in rows:
        for which, record in (("first", row["records"][0]), ("best", row["records"][-1])):
            scores = ", ".join(f"{name} {number(score)}" for name, score in record["scores"].items())
            text = f"{row['arm']}, {which} ({record['forwards']} forwards): {scores}"
            cells.append((folder / row["files"][which], text))
    return cells
