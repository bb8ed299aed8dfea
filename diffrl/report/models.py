"""Many sets in one table: a row for each, sorted by a click, nothing cut on a phone; and the same as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from diffrl.divgen.score import METRICS
from diffrl.records.progress import number

if TYPE_CHECKING:
    from diffrl.report.divgen import Entry

STYLE = """<style>
.models { width: 100%; font-size: 13.5px } .models th, .models td { padding: 4px 8px 4px 0; vertical-align: top }
.models thead th { cursor: pointer; white-space: normal } .models thead th[aria-sort]::after { content: " ▾" }
.models thead th[aria-sort=ascending]::after { content: " ▴" }
.models tbody th { overflow-wrap: anywhere; max-width: 210px; text-align: left }
.models td.less { box-shadow: inset 3px 0 var(--bad); padding-left: 7px } .models td.more { box-shadow: inset 3px 0
  var(--good); padding-left: 7px } .models tr.less th { border-left: 5px solid var(--bad); padding-left: 6px }
.models small { display: block; color: var(--muted) } .models td:not(.less):not(.more) { padding-left: 10px }
@media (max-width: 760px) { .models, .models tbody, .models tr, .models td, .models tbody th { display: block }
  .models thead tr { display: flex; flex-wrap: wrap; gap: 2px 12px } .models thead { display: block }
  .models tbody tr { border-top: 1px solid var(--edge); padding: 6px 0 } .models tbody th { max-width: none }
  .models td { display: flex; flex-wrap: wrap; gap: 0 10px; padding: 2px 0 2px 10px }
  .models td small { display: inline }
  .models td::before { content: attr(data-name); color: var(--muted); min-width: 110px } }
</style>"""
# Numbers fall at the first click; sets without a value stay at the end.
SCRIPT = """
document.querySelectorAll('.models thead th').forEach((head, column) => head.addEventListener('click', () => {
  const body = head.closest('table').tBodies[0], down = head.getAttribute('aria-sort') !== 'descending';
  head.parentNode.querySelectorAll('th').forEach(one => one.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const key = row => row.cells[column].dataset.value ?? '';
  [...body.rows].sort((a, b) => {
    const x = key(a), y = key(b);
    if (x === '' || y === '') return (x === '') - (y === '');
    const order = isNaN(x) || isNaN(y) ? y.localeCompare(x) : y - x;
    return down ? order : -order;
  }).forEach(row => body.appendChild(row));
}));
"""


def ordered(entries: Sequence[Entry], by: str) -> list[Entry]:
    """The most diverse by this score first, sets without a value last; as they were for ""."""
    if not by:
        return list(entries)

    def key(entry: Entry) -> tuple[bool, float]:
        value = entry.scores.metrics[by].value
        return value is None, 0.0 if value is None else value if METRICS[by].lower else -value

    return sorted(entries, key=key)


def table(entries: Sequence[Entry], names: Sequence[str]) -> Markup:
    """A row for each set, a column for each score; who is surely less diverse has a red edge."""
    heads = Markup("<th>set</th>") + Markup("").join(
        Markup('<th title="{}">{} {}</th>').format(
            METRICS[n].meaning, METRICS[n].title, "↓" if METRICS[n].lower else "↑"
        )
        for n in names
    )
    rows = Markup("").join(_row(entry, names) for entry in entries)
    html = '<table class="models"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>'
    return Markup(html).format(heads, rows)


def _row(entry: Entry, names: Sequence[str]) -> Markup:
    less = sum(entry.verdict(name) == "less" for name in names)
    note = Markup("<small>less diverse in {} of {}</small>").format(less, len(names)) if less else ""
    swatch = Markup(
        '<i class="block" style="background-color: var(--{}); display: inline-block; width: 10px; height: 10px"></i> '
    )
    cells = Markup('<th scope="row" data-value="{}">{}{}{}</th>').format(
        entry.name, swatch.format(entry.color), entry.name, note
    )
    for name in names:
        score = entry.scores.metrics[name]
        if score.value is None:
            cells += Markup('<td data-name="{}" data-value="" title="{}">–</td>').format(METRICS[name].title, score.why)
            continue
        span = f"[{number(score.low)}, {number(score.high)}]" if score.low is not None else "too few prompts"
        against = Markup("<small>{}</small>").format(text) if (text := told(entry, name)) else ""
        cells += Markup('<td class="{}" data-name="{}" data-value="{}"><b>{}</b><small>{}</small>{}</td>').format(
            entry.verdict(name), METRICS[name].title, score.value, number(score.value), span, against
        )
    return Markup('<tr class="{}">{}</tr>').format("less" if less else "", cells)


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
