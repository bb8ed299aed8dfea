"""The commands `diffrl league ...`: what each method gains and loses at equal cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import subcommand
from diffrl.cli.comparing import asked_for
from diffrl.cli.league_runs import OUT, add_runs
from diffrl.records.disk import check_writable


def add_league(add: Callable[..., Any]) -> None:
    """Register the commands with the command line's `add`."""
    text = "what does each method gain, and what does it lose, at equal cost?"
    command = add("league", None, text, "diffrl league run --list", "diffrl league report --out league.html")
    actions = command.add_subparsers(metavar="run|check|cost|report", required=True)
    add_runs(actions)
    _add_report(actions)


def _add_report(actions: Any) -> None:
    examples = (
        "diffrl league report --out league.html",
        "diffrl league report mine/league.json --out mine.html --table mine.tex",
    )
    report = subcommand(actions, "report", _report, "draw the league's page, write its table", *examples)
    default = OUT / "league.json"
    text = f"what `diffrl league run` wrote (default {default})"
    report.add_argument("league", nargs="?", type=Path, default=default, metavar="LEAGUE.json", help=text)
    report.add_argument("--out", type=Path, metavar="FILE.html", help="the page to write")
    text = "the table over all results: Markdown, or LaTeX (booktabs)"
    report.add_argument("--table", type=Path, metavar="FILE.md|FILE.tex", help=text)


def _report(arguments: argparse.Namespace, rest: list[str]) -> int:
    out, table = asked_for("league report", arguments.out, arguments.table)
    for path, option in ((out, "--out"), (table, "--table")):
        if path is not None:
            check_writable(path.parent, option)
    from diffrl.report.league import write_league, write_league_table

    if out is not None:
        print(f"page: {write_league(arguments.league, out)}")
    if table is not None:
        print(f"table: {write_league_table(arguments.league, table)}")
    return 0
