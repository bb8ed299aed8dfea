"""How much of an epoch is not model, VAE or reward: the loop's own cost, from a run's metrics.jsonl.

python scripts/benchmarks/overhead.py runs/demo --out assets/results/overhead.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from diffrl.records.tracking import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of trainings on the CPU")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    table = {}
    for folder in args.runs:
        epochs = [m for m in read_metrics(folder) if m.get("seconds/overhead") is not None]
        shares = [m["seconds/overhead"] / m["seconds"] for m in epochs]
        table[folder.name] = {
            "epochs": len(epochs),
            "median_share": round(statistics.median(shares), 4),
            "largest_share": round(max(shares), 4),
            "seconds_per_epoch": round(statistics.median(m["seconds"] for m in epochs), 3),
            "seconds": {
                part: round(statistics.median(m[f"seconds/{part}"] for m in epochs), 3)
                for part in ("rollout", "reward", "optimise", "model", "overhead")
            },
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
