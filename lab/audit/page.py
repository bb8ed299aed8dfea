"""The page of `diffrl rewards audit`: the score, each exploit's, and the images that fooled beside the true ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffrl.errors import foreign
from diffrl.records.disk import write_text
from diffrl.records.progress import number
from diffrl.report.page import escape, grid, page, section, strip, table
from diffrl.report.plots import Dots, dots

SHOWN = 4  # images of each exploit
DEFINITION = (
    "An exploit's score is the share of the prompts for which its image, which does not show what the prompt asks for, "
    "scores higher than the prompt's true image. The reward's score is that of its worst exploit: 0 is no true image "
    "outranked, 1 all of them; without gradients it leaves the ascents out. On the same prompts it can be compared "
    "between rewards, whatever their scales."
)
LOOKS = (
    "True images drawn again with another value of a fact that their prompt leaves free, and nothing else changed: all "
    "are equally right, and a fair reward pays 0. Points are the mean score with the value less that with the others; "
    "beside them what they are of the points for a stated fact that is right."
)


def write_audit(folder: Path) -> Path:
    """Write `FOLDER/report.html` from its audit.json; UserError if that is not what diffrl writes."""
    with foreign(folder / "audit.json"):
        facts: Mapping[str, Any] = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
        body = f"<header><h1>Audit: {escape(facts['reward'])}</h1>{_lead(facts)}</header>"
        body += section("Exploits", _exploits(facts), DEFINITION)
        body += section("Looks that it prefers", _looks(facts), LOOKS) if facts["looks"] else ""
        body += section("What fooled it", _images(folder, facts), "The true image, and one that scores higher.")
    target = folder / "report.html"
    write_text(target, page(f"{facts['reward']}: audit · diffrl", body))
    return target


def _lead(facts: Mapping[str, Any]) -> str:
    worst = f"worst: {facts['worst']}" if facts["score"] > 0 else "no exploit outranked a true image"
    text = f"Score {facts['score']:.2f} on {facts['prompts_count']} prompts ({worst})."
    judge = (
        f" Held-out judge: {facts['judge']}."
        if facts["judge"]
        else " No held-out judge: a model's images are left out."
    )
    plain = f" Without gradients {facts['score_without_gradients']:.2f} ({facts['worst_without_gradients']})."
    return f"<p><b>{escape(text)}</b>{escape(plain + judge)}</p>"


def _exploits(facts: Mapping[str, Any]) -> str:
    rows = sorted(facts["exploits"], key=lambda one: -one["share"])
    series = Dots([one["share"] for one in rows], "c1", [(one["low"], one["high"]) for one in rows])
    drawn = dots([one["name"] for one in rows], [series], "share of true images outranked", "Share by exploit")
    cells = [
        [escape(one["name"]), f"{one['share']:.2f}", f"{one['low']:.2f} to {one['high']:.2f}", escape(one["detail"])]
        for one in rows
    ]
    shares = table(cells, ["exploit", "share", "95 % interval", ""], "numbers")
    return grid([f'<figure class="card">{drawn}</figure>']) + shares


def _looks(facts: Mapping[str, Any]) -> str:
    looks = facts["looks"][:6]
    cells = [
        [escape(f"{one['fact']} {one['value']}"), f"{one['points']:+.3g}", number(one["share"]), str(one["images"])]
        for one in looks
    ]
    return table(cells, ["look", "points", "over a right fact", "images"], "numbers")


def _images(folder: Path, facts: Mapping[str, Any]) -> str:
    parts = []
    order = sorted(facts["exploits"], key=lambda one: -one["share"])
    for one in order:
        strips = []
        for row in facts["fooled"].get(one["name"], []):
            cells = []
            for which in ("true", "fooled"):
                score = row.get(f"{which}_score")
                caption = which if score is None else f"{which}: {number(score)}"
                cells.append((folder / "images" / Path(row[which]).name, caption))
            strips.append(strip(row["prompt"], cells))
        if strips:
            parts.append(f"<h3>{escape(one['name'])}</h3>{grid(strips, 'strips')}")
    return "".join(parts) or "<p>Nothing did.</p>"
