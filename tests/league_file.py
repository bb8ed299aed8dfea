"""The league.json of seven methods' finished results on the preference model, for tests of its page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffrl.league.plan import ON_POLICY, read_league
from diffrl.league.summary import summarise

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "assets" / "results"
METHODS = ("nft", "crd", "grpo", "grpo_guard", "dppo", "awm", "dgpo")
TRACK, SEEDS = "preference", 3


def league_of_brakes(folder: Path) -> dict[str, Any]:
    """Written to `folder`: with four optimiser steps an epoch, and with one."""
    files = {method: f"{TRACK}_{method}_4.json" for method in METHODS}
    files |= {f"{method}{ON_POLICY}": f"{TRACK}_{method}_1.json" for method in METHODS}
    (folder / "league" / TRACK).mkdir(parents=True)
    for name, file in files.items():
        moved = RESULTS / "league" / TRACK / f"{name}.json"
        source = moved if moved.is_file() else RESULTS / "brakes" / file
        facts = json.loads(source.read_text())
        facts["runs"] = [run for run in facts["runs"] if run["seed"] < SEEDS]  # as many, whatever is added later
        (folder / "league" / TRACK / f"{name}.json").write_text(json.dumps(facts))
    whole = read_league()
    league = replace(whole, tracks={TRACK: whole.tracks[TRACK]}, entries={name: whole.entries[name] for name in files})
    return summarise(league, league.experiments(folder, seeds=SEEDS), folder, "diffrl league run")
