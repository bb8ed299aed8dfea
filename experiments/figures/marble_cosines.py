"""How often a step went against one of the rewards: MARBLE's diagnostics over whole runs, as in the paper's Table S1.

    python -m experiments.figures.marble_cosines MARBLE=runs/marble-0,runs/marble-1 --out cosines.json

Of every optimiser step's `min_k cos(d, g_k)`: the lowest, the mean, and the share of steps in which it is below zero.
Runs in mode amortised know it in their solving steps only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from diffrl import __version__
from diffrl.records.tracking import read_metrics
from experiments import command


def lowest_cosines(folder: str) -> list[float]:
    """min over the rewards, of each step that was measured."""
    steps = [json.loads(m["marble/steps"]) for m in read_metrics(Path(folder)) if m.get("marble/steps")]
    cosines = [[c for c in step["cos"] if c is not None] for epoch in steps for step in epoch if step.get("cos")]
    return [min(row) for row in cosines if row]


def table(result: dict[str, Any]) -> str:
    """How often a step went against one of the rewards."""
    lines = ["| | measured steps | lowest cosine | mean of the lowest | steps against a reward |", "| --- " * 5 + "|"]
    for label, row in result.items():
        if isinstance(row, dict):
            lines.append(
                f"| {label} | {row['steps']:.0f} | {row['lowest']:+.2f} | {row['mean']:+.2f} | {row['conflicts']:.0%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="LABEL=RUN_DIR[,RUN_DIR...]")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"command": command(), "diffrl_version": __version__}
    for text in args.variants:
        label, _, folders = text.partition("=")
        lowest = np.array([cosine for folder in folders.split(",") for cosine in lowest_cosines(folder)])
        row = {"steps": len(lowest), "lowest": lowest.min(), "mean": lowest.mean(), "conflicts": (lowest < 0).mean()}
        result[label] = {key: round(float(value), 4) for key, value in row.items()}
    print(table(result))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
