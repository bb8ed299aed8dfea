"""The page of `diffrl rewards audit`: the score, each exploit's, and the images that fooled beside the true ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.records.progress import number
from diffrl.report.built_page import Page
from diffrl.report.dot_plots import Dots, dots
from diffrl.report.page import Markup

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


def write_audit(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write `FOLDER/report.html` of what its audit.json holds, beside the images."""
    page = Page(f"{facts['reward']}: audit", f"Audit: {facts['reward']}")
    _lead(page, facts)
    exploits = sorted(facts["exploits"], key=lambda one: -one["share"])
    _exploits(page.section("Exploits", DEFINITION), exploits)
    rows = [
        [f"{one['fact']} {one['value']}", f"{one['points']:+.3g}", number(one["share"]), one["images"]]
        for one in facts["looks"][:6]
    ]
    page.section("Looks that it prefers", LOOKS).table(rows, ["look", "points", "over a right fact", "images"])
    page.section("What fooled it", "The true image, and one that scores higher.")
    for one in exploits:
        _images(page, folder, one["name"], facts["fooled"].get(one["name"], []))
    if not any(facts["fooled"].values()):
        page.lead("Nothing did.")
    return page.write(folder / "report.html")


def _lead(page: Page, facts: Mapping[str, Any]) -> None:
    worst = f"worst: {facts['worst']}" if facts["score"] > 0 else "no exploit outranked a true image"
    text = f"Score {facts['score']:.2f} on {facts['prompts_count']} prompts ({worst})."
    alone = "No held-out judge: a model's images are left out."
    judge = f"Held-out judge: {facts['judge']}." if facts["judge"] else alone
    plain = f"Without gradients {facts['score_without_gradients']:.2f} ({facts['worst_without_gradients']}). {judge}"
    page.lead(Markup("<b>{}</b> {}").format(text, plain))


def _exploits(page: Page, rows: Sequence[Mapping[str, Any]]) -> None:
    series = Dots([one["share"] for one in rows], "c1", [(one["low"], one["high"]) for one in rows])
    page.chart("", dots([one["name"] for one in rows], [series], "share of true images outranked", "Share by exploit"))
    cells = [
        [one["name"], f"{one['share']:.2f}", f"{one['low']:.2f} to {one['high']:.2f}", one["detail"]] for one in rows
    ]
    page.table(cells, ["exploit", "share", "95 % interval", ""])


def _images(page: Page, folder: Path, exploit: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        page.heading(exploit)
    for row in rows:
        cells = []
        for which in ("true", "fooled"):
            score = row.get(f"{which}_score")
            cells.append((folder / "images" / row[which], which if score is None else f"{which}: {number(score)}"))
        page.strip(row["prompt"], cells)
