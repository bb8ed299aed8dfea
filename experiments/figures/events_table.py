"""The table of what one of two nodes met, and how node 0 ended: `tests/slurm/test_events.py` with DIFFRL_EVENTS."""

from __future__ import annotations

import re
from typing import Any


def table(result: dict[str, Any] | None) -> str:
    """A row for each event; seconds from the event to the end of node 0's launcher."""
    if result is None:
        return ""
    launchers = {name: result[name] for name in ("torchrun", "srun") if name in result}
    events = list(dict.fromkeys(event for rows in launchers.values() for event in rows))
    lines = [f"| event on node 1 | {', '.join(launchers)}: node 0 ends after, s | its words |", "| --- | --- | --- |"]
    for event in events:
        found = [rows.get(event, {}) for rows in launchers.values()]
        seconds = ", ".join("-" if (value := row.get("seconds")) is None else f"{value:.0f}" for row in found)
        words = next(row["words"] for row in found if row)
        words = re.sub(r"\(process \d+", "(process P", words).replace("|", "/")
        lines.append(f"| {event} | {seconds} | {words[:150]}{' ...' * (len(words) > 150)} |")
    where = f"diffrl {result['version']} at {result['commit']}, two nodes on one machine of two cores"
    note = f"{where}, load {result['load']:g}."
    return "\n".join([*lines, "", note])
