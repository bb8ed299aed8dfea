"""A league.json of finished results of `scripts/reproduce.py`, for tests of its page: measured numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffrl.report.intervals import interval

ROOT = Path(__file__).parents[1]
BRAKES = ROOT / "assets" / "results" / "brakes"
PROXY, GOLD = "preference", "strict"
METHODS = {"nft": "DiffusionNFT", "crd": "CRD", "grpo": "Flow-GRPO", "grpo_guard": "GRPO-Guard"}
METHODS |= {"dppo": "Flow-DPPO", "awm": "AWM", "dgpo": "DGPO"}


def mean_half(values: Sequence[float]) -> dict[str, Any]:
    return dict(zip(("mean", "half"), interval(list(values)), strict=True))


def result_of(entry: str, file: Path) -> dict[str, Any]:
    runs = json.loads(file.read_text())["runs"]
    values = {}
    for name in runs[0]["after"]:
        before, after = ([run[side][name] for run in runs] for side in ("before", "after"))
        gains = [b - a for a, b in zip(before, after, strict=True)]
        mean, half = interval(gains)
        sides = {"before": interval(before)[0], "after": interval(after)[0]}
        values[name] = sides | {"gain": mean, "half": half, "se_prompts": None, "by_seed": gains}
    kept = [run["after"]["variety"] / run["before"]["variety"] for run in runs]
    curve = []
    for rows in zip(*(run["curve"] for run in runs), strict=True):
        names = [key[5:] for key in rows[0] if key.startswith("eval/") and key.count("/") == 1]
        seen = {name: mean_half([row[f"eval/{name}"] for row in rows]) for name in names}
        curve.append({"images": rows[0]["samples"], "forwards": None, "seconds": None, "values": seen})
    return {
        "track": PROXY, "entry": entry, "commit": sorted({run["commit"] for run in runs}), "config_sha": "",
        "result": f"league/{PROXY}/{entry}.json", "seeds": [run["seed"] for run in runs], "values": values, "gap": None,
        "variety_kept": mean_half(kept), "drift": None,
        "stability": {"std": None, "collapsed": sum(one < 0.5 for one in kept)},
        "cost": {"images": runs[0]["images"], "forwards": None, "seconds": None}, "curve": curve, "strip": None,
    }  # fmt: skip


def league_of_brakes() -> dict[str, Any]:
    """Seven methods with four steps an epoch and with one, on the preference model."""
    entries, results = {}, []
    for method, title in METHODS.items():
        for steps, end, words in ((4, "", ""), (1, "_on_policy", ", one step")):
            page = "docs/methods/brakes.md"
            entries[method + end] = {"kind": "base", "title": title + words, "page": page, "claim": "", "trials": None}
            results.append(result_of(method + end, BRAKES / f"preference_{method}_{steps}.json"))
    track: dict[str, Any] = {"proxy": [PROXY], "gold": [GOLD], "images": 12288, "shows": ""}
    track["lower_is_better"] = ["artefact", "unreadable"]
    return {
        "schema": 1, "diffrl_version": "0.2.0", "command": "diffrl league run", "weights": "", "left_out": [],
        "tracks": {PROXY: track}, "entries": entries, "results": results, "paired": [], "findings": [],
    }  # fmt: skip
