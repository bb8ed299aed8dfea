"""The league's headlines and tables for the pages, from assets/results/league.json, for `tables.py`."""

from __future__ import annotations

from experiments.figures.tables import RESULTS
from experiments.league.data import League, read_league
from experiments.league.table import LIMITS, as_file, headlines

FILE = RESULTS / "league.json"
NONE = "Not run yet."


def league() -> League | None:
    return read_league(FILE) if FILE.is_file() else None


def table() -> str:
    """A table for each track, in the order of the entries."""
    found = league()
    if found is None:
        return NONE
    parts = [f"**{track.name}**. {track.shows}\n\n{as_file(found, '.md', track.name)}" for track, _ in headlines(found)]
    return "\n".join(parts)


def summary() -> str:
    """What each track's results say, a line each."""
    found = league()
    return NONE if found is None else "\n".join(f"- **{track.name}**: {text}" for track, text in headlines(found))


def limits() -> str:
    """What the playground cannot tell."""
    return "\n".join(f"- {line}" for line in LIMITS)
