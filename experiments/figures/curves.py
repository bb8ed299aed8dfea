"""Values on held-out prompts over the images that a training has seen, several methods in one picture.

    python -m experiments.figures.curves NFT=crd/clip_nft.json CRD=crd/clip_crd.json --keys clip strict --out curves.png

Files are below assets/results. A panel for each key: the mean over the seeds, and a band from the lowest to the highest
seed. `a|b` is the first of two names that a file has: a corrected reward's plain value has a name of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

RESULTS = Path(__file__).resolve().parents[2] / "assets" / "results"
ACROSS = 3  # panels in a row


def curves(result: dict[str, Any], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(images (E,), values (seeds, E)) of the evaluations that all seeds have."""
    runs = [run["curve"] for run in result["runs"]]
    name = next((f"eval/{one}" for one in key.split("|") if f"eval/{one}" in runs[0][0]), None)
    if name is None:
        raise SystemExit(f"curves: no {key} in {', '.join(sorted(k[5:] for k in runs[0][0] if k.startswith('eval/')))}")
    count = min(len(run) for run in runs)
    values = np.array([[row[name] for row in run[:count]] for run in runs])
    return np.array([row["samples"] for row in runs[0][:count]]), values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="LABEL=FILE")
    parser.add_argument("--keys", nargs="+", required=True, metavar="NAME", help="of an evaluation's values")
    parser.add_argument("--titles", nargs="+", metavar="TEXT", help="of the panels; default: the keys")
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    args = parser.parse_args()
    if args.titles and len(args.titles) != len(args.keys):
        parser.error(f"--titles: {len(args.titles)} for {len(args.keys)} keys")
    results = {
        text.rpartition("=")[0]: json.loads((RESULTS / text.rpartition("=")[2]).read_text()) for text in args.variants
    }
    across = min(len(args.keys), ACROSS)
    down = -(-len(args.keys) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.4 * across, 2.7 * down), squeeze=False, layout="constrained")
    for empty in axes.flat[len(args.keys) :]:
        empty.set_visible(False)
    for axis, key, title in zip(axes.flat, args.keys, args.titles or args.keys, strict=False):
        for label, result in results.items():
            images, values = curves(result, key)
            (line,) = axis.plot(images, values.mean(0), marker="o", markersize=3, linewidth=1.5, label=label)
            axis.fill_between(images, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("images", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
