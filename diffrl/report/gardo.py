"""GARDO in the report: how the gate moved, and the images that it trusted least, with what the rewards said of them.

`RUN_DIR/gardo/epoch-NNNN.json` holds the rows of one evaluated epoch, `epoch-NNNN-NN.png` the image of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.errors import UserError
from diffrl.records.progress import number
from diffrl.report.data import RunData, parsed, within
from diffrl.report.page import grid, img, section, strip, table
from diffrl.report.sections import metric_chart

FOLDER = "gardo"
_IMAGE = re.compile(r"epoch-\d+-\d+\.png")
EARLIER = 3  # epochs before the last that are shown, as rows of images
CHARTS = {
    "gardo/gate": ("gate share", "share of samples"),
    "gardo/penalised": ("penalised", "share of samples"),
    "gardo/uncertainty": ("uncertainty", "mean U of U >= 0"),
    "gardo/kl_gated": ("KL of the penalised rows", "KL divergence"),
    "gardo/resets": ("resets of the reference", "resets so far"),
    "gardo/forwards_saved": ("reference forwards saved", "share of rows"),
    "gardo/nearest": ("nearest image of the group", "mean distance d"),
}
NOTE = (
    "The penalty holds only those images back that the optimised score (proxy) ranks high and the auxiliary rewards "
    "rank low. U = the proxy's win rate in the epoch's batch less the auxiliary rewards' mean win rate, in [-1, 1]. "
    "The images below have the highest U of their epoch: this is what the gate caught."
)


def gardo(run: RunData) -> str:
    """The report's section; nothing for a run without GARDO."""
    cards = [metric_chart(run, key, title, label, title) for key, (title, label) in CHARTS.items()]
    epochs = _read(run.folder / FOLDER)
    body = grid(cards)
    if epochs:
        last = max(epochs)
        body += f"<h3>Epoch {last}: the most uncertain images</h3>{_table(run.folder / FOLDER, epochs[last])}"
        earlier = sorted(set(epochs) - {last}, reverse=True)[:EARLIER]
        body += "".join(_strip(run.folder / FOLDER, epoch, epochs[epoch]) for epoch in earlier)
    return section("GARDO: what the gate caught", body, NOTE if epochs else "")


def _read(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Rows by epoch."""
    epochs = {}
    for path in sorted(folder.glob("epoch-*.json")):
        rows = parsed(path, json.loads)
        if not isinstance(rows, list) or not all(map(_is_row, rows)):
            raise UserError(f"{path}: expected a list of objects with prompt, uncertainty, penalised, scores and image")
        # A folder may be a stranger's, and a report be sent on: it shows the folder's own pictures and no others.
        for row in rows:
            if not _IMAGE.fullmatch(row["image"]) or not within(folder / row["image"], folder.parent):
                raise UserError(f'{path}: image "{row["image"]}" is not a picture of this folder')
        epochs[int(path.stem.removeprefix("epoch-"))] = rows
    return epochs


def _is_row(row: Any) -> bool:
    kinds = {"prompt": str, "penalised": bool, "scores": dict, "image": str}
    if not isinstance(row, dict) or not all(isinstance(row.get(key), kind) for key, kind in kinds.items()):
        return False
    return all(isinstance(value, int | float | None) for value in (row.get("uncertainty"), *row["scores"].values()))


def _table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0]["scores"]) if rows else []
    lines = []
    for row in rows:
        held = "held back" if row["penalised"] else "not held back"
        scores = [number(row["scores"].get(name)) for name in names]
        lines.append(
            [img(folder / row["image"], row["prompt"]), row["prompt"], number(row["uncertainty"]), *scores, held]
        )
    return table(lines, ["image", "prompt", "U", *map(str, names), "penalty"])


def _strip(folder: Path, epoch: int, rows: Sequence[Mapping[str, Any]]) -> str:
    images = []
    for row in rows:
        scores = ", ".join(f"{name} {number(score)}" for name, score in row["scores"].items())
        images.append((folder / row["image"], f"U {number(row['uncertainty'])}: {scores}"))
    return strip(f"epoch {epoch}", images)
