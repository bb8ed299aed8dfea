"""Many sets in one table: a row for each, sorted by a click, nothing cut on a phone; and the same as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffrl.divgen.score import METRICS, Score
from diffrl.records.progress import number
from diffrl.report.data import RunData
from diffrl.report.page import TEMPLATES, Markup, section
from diffrl.report.page import table as table_of

if TYPE_CHECKING:
    from diffrl.report.divgen import Entry

PIECES: Any = TEMPLATES.get_template("divgen.html.j2").module


def ordered(entries: Sequence[Entry], by: str) -> list[Entry]:
    """The most diverse by this score first, sets without a value last; as they were for ""."""
    if not by:
        return list(entries)

    def key(entry: Entry) -> tuple[bool, float]:
        value = entry.scores.metrics[by].value
        return value is None, 0.0 if value is None else value if METRICS[by].lower else -value

    return sorted(entries, key=key)


def table(entries: Sequence[Entry], names: Sequence[str]) -> str:
    """A row for each set, a column for each score; who is surely less diverse has a red edge."""
    rows = [(entry, sum(entry.verdict(name) == "less" for name in names)) for entry in entries]
    return str(PIECES.models(rows, names, METRICS, span, told, number))


def span(score: Score) -> str:
    """A score's interval, as text."""
    return "too few prompts" if score.low is None else f"[{number(score.low)}, {number(score.high)}]"


def told(entry: Entry, name: str) -> str:
    """A score's change against the first set, with its p-value; "" where there is none."""
    if name not in entry.tests:
        return ""
    found, p = entry.tests[name]
    chance = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    return f"{found.change:+.3f}, {chance}".replace("-", "−", 1)


def as_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A row for each set and score, as in the CSV."""
    rows = []
    for entry in entries:
        for name, score in entry.scores.metrics.items():
            change, p = entry.tests.get(name, (None, None))
            row: dict[str, Any] = {"set": entry.name, "score": name}
            row |= {key: getattr(score, key) for key in ("value", "low", "high", "images", "prompts")}
            row |= {"change": change and change.change, "p": change and change.p, "p_holm": p}
            rows.append(row | {"verdict": entry.verdict(name), "why": score.why})
    return rows


def as_csv(entries: Sequence[Entry]) -> str:
    text = io.StringIO()
    rows = as_rows(entries)
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json(entries: Sequence[Entry], differences: Sequence[str]) -> str:
    sets: list[Mapping[str, Any]] = [{"name": entry.name, "about": entry.scores.about} for entry in entries]
    content = {"differences": list(differences), "sets": sets, "scores": as_rows(entries)}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def measured(run: RunData) -> str:
    """A run's section: DivGenBench's scores, where `diffrl report RUN --divgen` has measured them."""
    file = run.folder / "divgen" / "report.json"
    if not file.is_file():
        return ""
    found: dict[str, dict[str, str]] = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["scores"]:
        if row["value"] is not None:
            mark = {"less": " (surely less diverse)", "more": " (surely more diverse)"}.get(row["verdict"], "")
            found.setdefault(row["score"], {})[row["set"]] = number(row["value"]) + mark
    sets = list(dict.fromkeys(name for values in found.values() for name in values))
    rows = [[METRICS[name].title, *(values.get(one, "–") for one in sets)] for name, values in found.items()]
    page = Markup('<p><a href="divgen/report.html">With intervals, tests and pictures</a></p>')
    note = "The same prompts and noise with the base model and with the LoRA after so many epochs."
    return section("DivGenBench", page + Markup(table_of(rows, ["", *sets], "numbers")), note)
