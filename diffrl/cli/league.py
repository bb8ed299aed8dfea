"""The commands `diffrl league ...`: what each method gains and loses at equal cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffrl.cli.league_runs import add_runs


def add_league(add: Callable[..., Any]) -> None:
    """Register the commands with the command line's `add`."""
    text = "what does each method gain, and what does it lose, at equal cost?"
    command = add("league", None, text, "diffrl league run --list")
    actions = command.add_subparsers(metavar="run|check|cost", required=True)
    add_runs(actions)
