"""DivGenBench over the seeds of several methods: a Markdown table, and the same as JSON.

    python -m experiments.figures.divgen_table base=divgen/base GRPO=divgen/grpo-0,divgen/grpo-1 --out divgen.json
    python -m experiments.figures.divgen_table ... --gold GRPO=assets/results/grpo.json --out divgen.json

The folders are those of `diffrl divgen score`. A cell is the mean over the folders and the deviation between them.
`--gold`: results of `experiments.reproduce` whose seeds are a method's folders, in their order. Their exact variety and
share of right facts stand beside the scores then, and Spearman's correlation of each score with the variety over all
folders that have one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from diffrl import __version__
from experiments import command

COLUMNS = {"ids": "IDS ↓", "asc": "ASC", "sdi": "SDI", "pvs": "PVS", "diversity": "group diversity", "vendi": "Vendi"}


def values(folder: str) -> dict[str, float]:
    scores = json.loads((Path(folder) / "scores.json").read_text())["metrics"]
    return {name: scores[name]["value"] for name in COLUMNS}


def gold(file: str) -> list[dict[str, float]]:
    """Variety and facts right of each seed of a result."""
    runs = json.loads(Path(file).read_text())["runs"]
    return [{"variety": run["after"]["variety"], "facts right": run["after"]["strict"]} for run in runs]


def agreement(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Spearman's correlation with the variety, and its p, of each score."""
    varieties = [row["variety"] for row in rows]
    result = {}
    for name in COLUMNS:
        test = stats.spearmanr([row[name] for row in rows], varieties)
        result[name] = {"correlation": round(float(test.statistic), 3), "p": float(test.pvalue)}
    return result


def table(result: dict[str, Any]) -> str:
    """DivGenBench's scores of several methods, and the exact variety."""
    agreed = result.get("agreement with the variety")
    extra = {"variety": "**variety** (exact)", "facts right": "facts right"} if agreed else {}
    columns = COLUMNS | extra
    lines = [f"| method | {' | '.join(columns.values())} |", "| --- " * (len(columns) + 1) + "|"]
    for label, runs in result.items():
        if isinstance(runs, list):
            cells = []
            for name in columns:
                values = np.array([run[name] for run in runs if name in run])
                spread = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
                cells.append(f"{values.mean():.3f}{spread}" if len(values) else "")
            lines.append(f"| {label} | {' | '.join(cells)} |")
    if agreed:
        cells = [f"{agreed[name]['correlation']:+.2f}" for name in COLUMNS]
        lines.append(f"| rank correlation with the variety, {agreed['folders']} models | {' | '.join(cells)} | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="LABEL=DIR[,DIR...]")
    parser.add_argument("--gold", nargs="+", default=[], metavar="LABEL=FILE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    golds = {label: gold(file) for label, _, file in (text.partition("=") for text in args.gold)}
    methods: dict[str, list[dict[str, float]]] = {}
    result: dict[str, Any] = {"command": command(), "diffrl_version": __version__}
    for text in args.methods:
        label, _, folders = text.partition("=")
        scores = [values(folder) for folder in folders.split(",")]
        if label in golds and len(golds[label]) != len(scores):
            raise SystemExit(f"divgen_table: {label} has {len(scores)} folders and {len(golds[label])} seeds")
        methods[label] = [row | more for row, more in zip(scores, golds.get(label, [{}] * len(scores)), strict=True)]
    result |= methods
    if golds:
        rows = [row for runs in methods.values() for row in runs if "variety" in row]
        result["agreement with the variety"] = agreement(rows) | {"folders": len(rows)}
    print(table(result))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
