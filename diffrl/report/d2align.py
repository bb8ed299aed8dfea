"""The report's section on D2-Align: how stage 1 went, what the corrected reward ranks differently, and its words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffrl.errors import foreign
from diffrl.records.progress import number
from diffrl.report.built_page import Page
from diffrl.report.data import RunData
from diffrl.report.plots import Axis, Line

EVIDENCE = Path("d2align", "evidence.json")
_PARTS = 10  # of the ranking


def direction(run: RunData) -> str:
    """The section, or nothing for a run that learned no direction."""
    run.series("d2align/norm")  # a constant of the run: the text has it
    return _page(run.folder).sections()


def write_page(folder: Path) -> Path | None:
    """`RUN_DIR/d2align/report.html`: the section as a page of its own; None if no direction was learned there."""
    with foreign(folder / EVIDENCE):
        page = _page(folder)
    return page.write(folder / EVIDENCE.parent / "report.html") if page.sections() else None


def _page(folder: Path) -> Page:
    """Of one section; of none where no direction was learned."""
    file, name = folder / EVIDENCE, folder.resolve().name
    page = Page(f"{name}: direction", name)
    if not file.is_file():
        return page
    evidence: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    first, last = evidence["course"][0], evidence["course"][-1]
    agreement = "" if evidence["spearman"] is None else f", whose rank correlation is {evidence['spearman']:.3f}"
    images = f"{evidence['images']:,} images of the pretrained model"
    made = f"{last[0]:,} steps brought the mean guided reward of {images} from {number(first[1])} to {number(last[1])}"
    if word := evidence.get("word"):
        made = f"the direction is that of the word “{word}”; mean guided reward of {images}: {number(last[1])}"
    note = "A direction in the reward's text space, found before the training; what lies along it stops to be paid."
    page.section("D2-Align's direction", note).lead(
        f"Reward {evidence['reward']}, omega {evidence['omega']:g}: {made}; the direction has length {number(last[2])}."
        f" Below, those images are ranked by the plain and by the corrected reward{agreement}."
    )
    for column, title, label in ((1, "guided reward", "mean over the pool"), (2, "length of the direction", "norm")):
        if len(evidence["course"]) > 1:
            xs, ys = ([row[k] for row in evidence["course"]] for k in (0, column))
            axis = Axis(x="steps of stage 1", y=label, description=f"{title} against steps")
            page.chart(title, [Line(xs, ys, "c0")], axis)
    _ranking(page, evidence["ranks"])
    pairs = zip(evidence["words"]["nearest"], evidence["words"]["farthest"], strict=True)
    rows = [[a, f"{x:+.3f}", b, f"{y:+.3f}"] for (a, x), (b, y) in pairs]
    page.heading("Words").table(rows, ["nearest to the direction", "cosine", "farthest", "cosine"])
    for how, images_of in (("falls", evidence["fallen"]), ("rises", evidence["risen"])):
        shown = [row for row in images_of if (folder / EVIDENCE.parent / row["file"]).is_file()]
        if shown:
            page.heading(f"Images whose rank {how} most")
        for row in shown:
            caption = f"rank {row['rank_plain']:,} → {row['rank_corrected']:,}"
            scores = f"{number(row['plain'])} → {number(row['corrected'])}"
            page.strip(row["prompt"], [(folder / EVIDENCE.parent / row["file"], f"{caption}; {scores}")])
    return page


def _ranking(page: Page, ranks: Sequence[Sequence[int]]) -> None:
    """Mean corrected rank of each tenth of the plain ranking, as shares of the whole."""
    ordered = [corrected for _, corrected in sorted(map(tuple, ranks))]
    count = min(_PARTS, len(ordered))
    bounds = [i * len(ordered) // count for i in range(count + 1)]
    xs, ys = [], []
    for low, high in itertools.pairwise(bounds):
        xs.append((low + high) / 2 / len(ordered))
        ys.append(sum(ordered[low:high]) / (high - low) / len(ordered))
    same = Line(xs, xs, "c7", "the same order", "dashed")
    lines = [same, Line(xs, ys, "c1", "corrected reward", "dots")]
    axis = Axis(x="place under the plain reward, 0 is best", y="mean place", description="Mean corrected rank by rank")
    page.chart("ranking", lines, axis, "plain against corrected")
