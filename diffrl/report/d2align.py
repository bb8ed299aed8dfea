"""The report's section on D2-Align: how stage 1 went, what the corrected reward ranks differently, and its words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.errors import foreign
from diffrl.records.disk import write_text
from diffrl.records.progress import number
from diffrl.report.data import RunData
from diffrl.report.page import escape, figure, grid, page, section, strip, table
from diffrl.report.plots import Axis, Line, chart

EVIDENCE = Path("d2align", "evidence.json")
_PARTS = 10  # of the ranking


def direction(run: RunData) -> str:
    """The section, or nothing for a run that learned no direction."""
    run.series("d2align/norm")  # a constant of the run: the text has it
    return _section(run.folder)


def write_page(folder: Path) -> Path | None:
    """`RUN_DIR/d2align/report.html`: the section as a page of its own; None if no direction was learned there."""
    with foreign(folder / EVIDENCE):
        body = _section(folder)
    if not body:
        return None
    target = folder / EVIDENCE.parent / "report.html"
    name = folder.resolve().name
    write_text(target, page(f"{name}: direction · diffrl", f"<h1>{escape(name)}</h1>{body}"))
    return target


def _section(folder: Path) -> str:
    file = folder / EVIDENCE
    if not file.is_file():
        return ""
    evidence: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    first, last = evidence["course"][0], evidence["course"][-1]
    agreement = "" if evidence["spearman"] is None else f", whose rank correlation is {evidence['spearman']:.3f}"
    images = f"{evidence['images']:,} images of the pretrained model"
    made = f"{last[0]:,} steps brought the mean guided reward of {images} from {number(first[1])} to {number(last[1])}"
    if word := evidence.get("word"):
        made = f"the direction is that of the word “{escape(word)}”; mean guided reward of {images}: {number(last[1])}"
    lead = (
        f"<p>Reward {escape(evidence['reward'])}, omega {evidence['omega']:g}: {made}; the direction has length "
        f"{number(last[2])}. Below, those images are ranked by the plain and by the corrected reward{agreement}.</p>"
    )
    note = "A direction in the reward's text space, found before the training; what lies along it stops to be paid."
    course = _course(evidence["course"]) if len(evidence["course"]) > 1 else []
    parts = [lead, grid([*course, _ranking(evidence["ranks"])]), _words(evidence["words"])]
    parts += [_images(folder, "falls", evidence["fallen"]), _images(folder, "rises", evidence["risen"])]
    return section("D2-Align's direction", "".join(parts), note)


def _course(course: Sequence[Sequence[float]]) -> list[str]:
    steps = [row[0] for row in course]
    cards = []
    for column, title, label in ((1, "guided reward", "mean over the pool"), (2, "length of the direction", "norm")):
        axis = Axis(x="steps of stage 1", y=label, description=f"{title} against steps")
        cards.append(figure(title, chart([Line(steps, [row[column] for row in course], "c0")], axis)))
    return cards


def _ranking(ranks: Sequence[Sequence[int]]) -> str:
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
    legend = [(line.color, line.kind, line.label) for line in lines]
    return figure("ranking", chart(lines, axis), "plain against corrected", legend)


def _words(words: Mapping[str, Sequence[Sequence[Any]]]) -> str:
    pairs = zip(words["nearest"], words["farthest"], strict=True)
    rows = [[escape(a), f"{x:+.3f}", escape(b), f"{y:+.3f}"] for (a, x), (b, y) in pairs]
    return "<h3>Words</h3>" + table(rows, ["nearest to the direction", "cosine", "farthest", "cosine"], "numbers")


def _images(folder: Path, how: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The images whose rank changes most; the caption has both ranks and both scores."""
    strips = []
    for row in rows:
        path = folder / EVIDENCE.parent / row["file"]
        if path.is_file():
            caption = f"rank {row['rank_plain']:,} → {row['rank_corrected']:,}"
            scores = f"{number(row['plain'])} → {number(row['corrected'])}"
            strips.append(strip(row["prompt"], [(path, f"{caption}; {scores}")]))
    return f"<h3>Images whose rank {how} most</h3>{grid(strips, 'strips')}" if strips else ""
