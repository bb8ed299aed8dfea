"""The page of `diffrl sample`: the images under their prompts, with their scores if they were scored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from diffrl.additions.verdict import Change
from diffrl.errors import foreign
from diffrl.records.held_out import HeldOut
from diffrl.records.progress import number
from diffrl.report.built_page import Page
from diffrl.report.sections import within
from diffrl.stats import interval

SHOWN = 64  # images of a page, at most: it holds them


def write_drawn(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write `FOLDER/images.html` of what `diffrl.drawing.sample` has drawn there; `facts`: what it returned."""
    with foreign(folder):
        sides = {"LoRA" if facts["base"] else "": folder} | ({"base": folder / "base"} if facts["base"] else {})
        rows = {side: _rows(place) for side, place in sides.items()}
        each, count = facts["per_prompt"], len(next(iter(rows.values())))
        lora = f"LoRA {facts['lora']}, " if facts["lora"] else ""
        drawn = (
            f"{facts['sampler']}, {facts['steps']} steps, guidance {facts['guidance_scale']:g}, seed {facts['seed']}"
        )
        page = Page(folder.resolve().name, f"Images of {facts['model']}").lead(lora + drawn, "sub")
        page.section("Scores", "Means over the prompts, ± the standard error over them.")
        held = HeldOut()
        for epoch, side in enumerate(reversed(list(rows))):
            held.add(epoch, _by_prompt(rows[side], each))
        heads = ["base", "with the LoRA", "change"] if facts["base"] else ["mean"]
        page.table(_means(held), ["reward", *heads])
        shown = min(count, SHOWN // len(rows))
        note = f"The first {shown} of {count:,} images; all are in the folder." if count > shown else ""
        page.section("Images", note)
        for i in range(0, shown, each):
            cells = []
            for side in reversed(list(rows)):
                for row in rows[side][i : min(i + each, shown)]:
                    scores = (f"{name} {number(score)}" for name, score in row.get("scores", {}).items())
                    caption = ", ".join([*filter(None, [side]), *scores])
                    cells.append((sides[side] / row["file"], caption))
            columns = each * len(rows)
            kind = "tiles" if columns == 1 else "charts" if columns == 2 else "strips"
            page.strip(rows[next(iter(rows))][i]["prompt"], cells, kind)
    return page.write(folder / "images.html")


def _rows(folder: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (folder / "images.jsonl").read_text(encoding="utf-8").strip().split("\n")]


def _by_prompt(rows: Sequence[Mapping[str, Any]], per_prompt: int) -> dict[str, list[float | None]]:
    """Each prompt's mean of each reward."""
    groups = [rows[i : i + per_prompt] for i in range(0, len(rows), per_prompt)]
    names = list(rows[0].get("scores", {}))
    return {name: [_mean([row["scores"][name] for row in group]) for group in groups] for name in names}


def _means(held: HeldOut) -> list[list[str]]:
    """A row for each reward: of the one model that was drawn, or of the base, of the LoRA and of the paired change."""
    cells = []
    for name in held.epochs[0]:
        means = {epoch: held.mean(name, epoch) for epoch in held.epochs}
        shown = [
            "applies to none of the prompts" if mean is None else number(mean) + within(held.error(name, epoch))
            for epoch, mean in means.items()
        ]
        if len(means) > 1:
            gap = interval(held.differences(name, 0, 1))[0]
            error = held.change_error(name, 0, 1)
            shown.append("–" if gap != gap else Change(gap, error, 0).text + within(error))
        cells.append([name, *shown])
    return cells


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
