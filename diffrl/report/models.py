"""Many sets in one table: a row for each, sorted by a click, nothing cut on a phone; and the same as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffrl.divgen.score import METRICS, Score
from diffrl.records.progress import number
from diffrl.report.page import TEMPLATES

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
            rows.append(
                {
                    "set": entry.name,
                    "score": name,
                    "value": score.value,
                    "low": score.low,
                    "high": score.high,
                    "images": score.images,
                    "prompts": score.prompts,
                    "change": change and change.change,
                    "p": change and change.p,
                    "p_holm": p,
                    "verdict": entry.verdict(name),
                    "why": score.why,
                }
            )
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
