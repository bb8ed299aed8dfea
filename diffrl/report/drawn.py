"""The page of `diffrl sample`: the images under their prompts, with their scores if they were scored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from diffrl.errors import foreign
from diffrl.records.held_out import HeldOut
from diffrl.records.progress import number
from diffrl.report.page import Page
from diffrl.report.sections import within

SHOWN = 64  # images of a page, at most: it holds them


def write_drawn(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write `FOLDER/images.html` of what `diffrl.drawing.sample` has drawn there; `facts`: what it returned."""
    with foreign(folder):
        lines = (folder / "images.jsonl").read_text(encoding="utf-8").splitlines()
        rows: list[Mapping[str, Any]] = [json.loads(line) for line in lines]
        each = facts["per_prompt"]
        lora = f"LoRA {facts['lora']}, " if facts["lora"] else ""
        drawn = (
            f"{facts['sampler']}, {facts['steps']} steps, guidance {facts['guidance_scale']:g}, seed {facts['seed']}"
        )
        page = Page(folder.resolve().name, f"Images of {facts['model']}").lead(lora + drawn, "sub")
        page.section("Scores", "Means over the prompts, ± the standard error over them.")
        page.table(_means(rows, each), ["reward", "mean"])
        note = f"The first {SHOWN} of {len(rows):,} images; all are in the folder." if len(rows) > SHOWN else ""
        page.section("Images", note)
        for i in range(0, min(len(rows), SHOWN), each):
            group = rows[i : min(i + each, SHOWN)]
            cells = [(folder / row["file"], _caption(row.get("scores", {}))) for row in group]
            page.strip(group[0]["prompt"], cells, "tiles" if each == 1 else "charts" if each == 2 else "strips")
    return page.write(folder / "images.html")


def _means(rows: Sequence[Mapping[str, Any]], per_prompt: int) -> list[list[str]]:
    """A row for each reward, from each prompt's mean."""
    held = HeldOut()
    groups = [rows[i : i + per_prompt] for i in range(0, len(rows), per_prompt)]
    names = list(rows[0].get("scores", {}))
    held.add(0, {name: [_mean([row["scores"][name] for row in group]) for group in groups] for name in names})
    cells = []
    for name in names:
        mean = held.mean(name, 0)
        shown = "applies to none of the prompts" if mean is None else number(mean) + within(held.error(name, 0))
        cells.append([name, shown])
    return cells


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _caption(scores: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {number(score)}" for name, score in scores.items())
