"""The page of `diffrl search`: scores over the budget, and each prompt's first image beside its best."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffrl.errors import foreign
from diffrl.records.disk import write_text
from diffrl.records.progress import number
from diffrl.report.data import PALETTE
from diffrl.report.page import escape, figure, grid, page, section, strip, table
from diffrl.report.plots import Axis, Line, chart

SHOWN = 16  # prompts whose images are shown
NOTE = (
    "Means over the prompts of the best image so far, by the rewards that are searched for. A value that is only "
    "watched is of the same images: where it falls while the rewards rise, the search finds what fools them."
)


def write_search(folder: Path) -> Path:
    """Write `FOLDER/report.html` of a finished search; UserError if its files are not what diffrl writes."""
    with foreign(folder):
        facts = json.loads((folder / "search.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (folder / "search.jsonl").read_text(encoding="utf-8").splitlines()]
        arms: Mapping[str, Any] = facts["arms"]
        body = f"<header><h1>Search: {escape(', '.join(facts['trained_on']))}</h1>{_lead(facts)}</header>"
        body += section("Over the budget", _curves(facts, arms), NOTE)
        body += section("From the first image to the best", _table(facts, arms))
        body += section("Images", _images(folder, rows, list(arms)), "The first image that was drawn, and the best.")
    target = folder / "report.html"
    write_text(target, page(f"{folder.resolve().name}: search · diffrl", body))
    return target


def _lead(facts: Mapping[str, Any]) -> str:
    lora = f" with {facts['lora']}" if facts["lora"] else ""
    text = f"{facts['model']}{lora}, {facts['prompts_count']} prompts, {facts['budget']:,} network forwards for each"
    spent = {arm: f"{one['forwards_spent']:,}" for arm, one in facts["arms"].items()}
    used = ", ".join(f"{arm} {count}" for arm, count in spent.items())
    return f"<p>{escape(text)} (spent: {escape(used)}; guidance counts twice where it takes a second row).</p>"


def _names(arms: Mapping[str, Any]) -> list[str]:
    first = next(iter(arms.values()))["curve"][0]
    return [name for name in first if name != "forwards"]


def _curves(facts: Mapping[str, Any], arms: Mapping[str, Any]) -> str:
    cards = []
    for name in _names(arms):
        lines = []
        for i, (arm, one) in enumerate(arms.items()):
            points = [(point["forwards"], point[name]) for point in one["curve"] if point[name] is not None]
            if points:
                xs, ys = zip(*points, strict=True)
                lines.append(Line(xs, ys, f"c{i % PALETTE}", arm))
        tag = "searched for" if name in facts["trained_on"] else "watched"
        tag += ", lower is better" if name in facts["lower_is_better"] else ""
        axis = Axis(x="network forwards for a prompt", y="mean score", description=f"{name} against forwards")
        if lines:
            cards.append(figure(name, chart(lines, axis), tag, [(line.color, line.kind, line.label) for line in lines]))
    return grid(cards)


def _table(facts: Mapping[str, Any], arms: Mapping[str, Any]) -> str:
    rows = []
    for arm, one in arms.items():
        first, last = one["curve"][0], one["curve"][-1]
        cells = [f"{number(first[name])} → {number(last[name])}" for name in _names(arms)]
        rows.append([escape(arm), f"{one['images']:,}", *cells])
    return table(rows, ["", "images", *_names(arms)], "numbers")


def _images(folder: Path, rows: list[Mapping[str, Any]], arms: list[str]) -> str:
    strips = []
    for prompt in list(dict.fromkeys(row["prompt"] for row in rows))[:SHOWN]:
        cells = []
        for row in rows:
            if row["prompt"] != prompt or row["arm"] not in arms:
                continue
            for which, record in (("first", row["records"][0]), ("best", row["records"][-1])):
                path = folder / "images" / Path(row["files"][which]).name
                scores = ", ".join(f"{name} {number(score)}" for name, score in record["scores"].items())
                cells.append((path, f"{row['arm']}, {which} ({record['forwards']} forwards): {scores}"))
        strips.append(strip(prompt, cells))
    return grid(strips, "strips")
