"""The league.json of seven methods' finished results on the preference model, for tests of its page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.league.plan import ON_POLICY, read_league
from experiments.league.summary import summarise

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "assets" / "results"
METHODS = ("nft", "crd", "grpo", "grpo_guard", "dppo", "awm", "dgpo")
TRACK, SEEDS = "preference", 3


def league_of_brakes(folder: Path) -> dict[str, Any]:
    """Written to `folder`: with four optimiser steps an epoch, and with one."""
    names = [f"{method}{end}" for end in ("", ON_POLICY) for method in METHODS]
    (folder / "league" / TRACK).mkdir(parents=True)
    for name in names:
        facts = json.loads((RESULTS / "league" / TRACK / f"{name}.json").read_text())
        facts["runs"] = [run for run in facts["runs"] if run["seed"] < SEEDS]  # as many, whatever is added later
        (folder / "league" / TRACK / f"{name}.json").write_text(json.dumps(facts))
    whole = read_league()
    league = replace(whole, tracks={TRACK: whole.tracks[TRACK]}, entries={name: whole.entries[name] for name in names})
    return summarise(league, league.experiments(folder, seeds=SEEDS), folder, "python -m experiments.league run")
