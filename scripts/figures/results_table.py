"""Put results of `scripts/reproduce.py` side by side: a Markdown table, one row a variant, the base model first.

    python scripts/figures/results_table.py "no KL=no_kl.json" "GARDO=gardo.json" --columns clip playground artefact

A cell is the mean over the seeds and half the width of its 95 % interval (Student's t over the seeds), on held-out
prompts; seconds are those of a training, one core each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats


def half_width(values: np.ndarray) -> float:
    """Half the width of the 95 % interval of the mean of two or more seeds' values."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5)


def cell(runs: list[dict[str, Any]], name: str) -> str:
    values = np.array([run["after"][name] for run in runs])
    return f"{values.mean():.3f} ± {half_width(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def table(variants: dict[str, dict[str, Any]], columns: list[str]) -> str:
    """Markdown of `{label: result}`; all of them must start from the same base model."""
    first = next(iter(variants.values()))["runs"][0]["before"]
    lines = [
        f"| variant | images | seconds | {' | '.join(columns)} |",
        "| --- " * (len(columns) + 3) + "|",
        f"| base | | | {' | '.join(f'{first[name]:.3f}' for name in columns)} |",
    ]
    for label, result in variants.items():
        runs = result["runs"]
        before = [run["before"][name] for run in runs for name in columns]
        if not np.allclose(before, [first[name] for _ in runs for name in columns], atol=1e-4):
            raise SystemExit(f"results_table: {label} started from another base model, or was judged on other prompts")
        cells = " | ".join(cell(runs, name) for name in columns)
        seconds = np.mean([run["training_seconds"] for run in runs])
        lines.append(f"| {label} | {runs[0]['images']:,} | {seconds:.0f} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="LABEL=FILE")
    parser.add_argument("--columns", nargs="+", default=["playground", "strict", "clip", "aesthetic", "diversity"])
    args = parser.parse_args()
    variants = {}
    for text in args.variants:
        label, _, path = text.rpartition("=")
        variants[label] = json.loads(Path(path).read_text())
    print(table(variants, args.columns))


if __name__ == "__main__":
    main()
