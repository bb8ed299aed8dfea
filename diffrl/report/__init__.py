"""Reports that open from the disk in any browser and fetch nothing: one run's, and several runs' side by side.

A method adds its own part by appending a function to `sections`: it takes the `RunData` and gives HTML (see `page` and
`plots` for the pieces), or an empty string when the run does not use the method. Metrics that it reads with
`RunData.series` are then not repeated under "Other metrics".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from diffrl.errors import foreign
from diffrl.records.disk import write_text
from diffrl.report.data import RunData, read_run, warnings_of
from diffrl.report.page import page
from diffrl.report.sections import curves, facts, headline, optimisation, others, samples, time_split

__all__ = ["RunData", "read_run", "sections", "warnings_of", "write_report"]

Section = Callable[[RunData], str]


def _where(used: Callable[[RunData], bool], module: str, function: str) -> Section:
    """A section whose module is loaded for the runs that it is of."""

    def drawn(run: RunData) -> str:
        found: str = getattr(importlib.import_module(f"diffrl.report.{module}"), function)(run) if used(run) else ""
        return found

    return drawn


def _named(name: str) -> Callable[[RunData], bool]:
    """Has the run metrics, or a folder, of this name?"""
    return lambda run: bool(run.logged(f"{name}/")) or (run.folder / name).is_dir()


def _in_parts(run: RunData) -> bool:
    return any("[" in name for values in run.held.epochs.values() for name in values)


sections: list[Section] = [
    *(headline, _where(_in_parts, "parts", "by_part"), curves, samples),
    _where(_named("gardo"), "gardo", "gardo"),
    _where(_named("marble"), "marble", "balance"),
    _where(_named("d2align"), "d2align", "direction"),
    *(optimisation, _where(_named("divgen"), "models", "measured")),
]
_LAST: tuple[Section, ...] = (others, time_split, facts)  # `others` draws what the sections before it have not


def write_report(run_dir: str | Path) -> Path:
    """Write `RUN_DIR/report.html` and return its path; an older report is replaced at once, never half.

    Raises:
        DiskError: it cannot be written; the older report stays.
        UserError: the folder is not a run's, or one of its files cannot be read.
    """
    run = read_run(run_dir)
    target = Path(run_dir) / "report.html"
    with foreign(run_dir):
        body = "\n".join(section(run) for section in (*sections, *_LAST))
    write_text(target, page(f"{run.name} · diffrl", body))
    return target
