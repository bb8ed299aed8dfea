"""Scores by parts, such as the playground's kinds of facts: which of them training raised, and which it lowered."""

from __future__ import annotations

import re
from collections.abc import Sequence

from diffrl.additions.verdict import change
from diffrl.records.progress import number
from diffrl.report.data import RunData
from diffrl.report.page import Markup, section, table
from diffrl.report.sections import signed

NAME = re.compile(r"(.+)\[(.+)\]")  # REWARD[PART], where a reward has a breakdown (`diffrl.rewards.protocol`)
TITLE = "Scores by kind"


def by_part(run: RunData) -> str:
    """One table for each reward that has a breakdown: every part before and after, with its error."""
    tables = []
    for owner, parts in _parts(run).items():
        rows = [[part, *_cells(run, f"{owner}[{part}]")] for part in parts]
        tables.append(table(rows, [owner, "prompts", "before", "after", "change"], "numbers"))
    note = "Each kind by itself, over the held-out prompts that state it, at the first and the last evaluation; for "
    note += "the playground the share of facts that are right. A change whose 95 % interval, paired over "
    note += "prompts, has 0 in it is noise and has no colour."
    return section(TITLE, "<br>".join(tables), note)


def compared(runs: Sequence[RunData]) -> str:
    """The parts that any of the runs has, one column for each run."""
    names = dict.fromkeys((owner, part) for run in runs for owner, parts in _parts(run).items() for part in parts)
    rows = []
    for owner, part in names:
        row: list[str] = [f"{owner}: {part}"]
        for run in runs:
            _, before, after, change = _cells(run, f"{owner}[{part}]")
            row.append(Markup("<span>{} → {}</span> {}").format(before, after, change) if after else "–")
        rows.append(row)
    note = "First → last evaluation, over the held-out prompts that state the part; changes as above."
    return section(TITLE, table(rows, ["", *(run.name for run in runs)], "numbers") if rows else "", note)


def _parts(run: RunData) -> dict[str, list[str]]:
    """The parts of each reward that some prompt states, in their order."""
    found: dict[str, list[str]] = {}
    if run.held.epochs:
        first, last = _ends(run)
        for name in run.held.epochs[last]:
            match = NAME.fullmatch(name)
            if match and run.held.mean(name, first) is not None and run.held.mean(name, last) is not None:
                found.setdefault(match[1], []).append(match[2])
    return found


def _ends(run: RunData) -> tuple[int, int]:
    return min(run.held.epochs), max(run.held.epochs)


def _cells(run: RunData, name: str) -> tuple[str, str, str, str]:
    """How many prompts state it, before, after, and the signed change; one evaluation has nothing after it."""
    if not run.held.epochs:
        return "", "", "", ""
    first, last = _ends(run)
    before, after = run.held.mean(name, first), run.held.mean(name, last)
    if before is None or after is None:
        return "", "", "", ""
    if first == last:
        return str(run.held.count(name, last)), number(before), "", signed(None)
    ends = [{"epoch": epoch, f"eval/{name}": value} for epoch, value in ((first, before), (last, after))]
    lower = {name} if name.partition("[")[0] in run.lower else ()
    moved = change(name, ends[0], ends[1], run.held, lower)
    return str(run.held.count(name, last)), number(before), number(after), signed(moved)
