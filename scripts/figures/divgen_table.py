"""DivGenBench over the seeds of several methods: a Markdown table, and the same as JSON.

    python scripts/figures/divgen_table.py base=divgen/base GRPO=divgen/grpo-0,divgen/grpo-1 --out divgen.json

The folders are those of `diffrl divgen score`. A cell is the mean over the folders and the deviation between them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import numpy as np

from diffrl import __version__

COLUMNS = {"ids": "IDS ↓", "asc": "ASC", "sdi": "SDI", "pvs": "PVS", "diversity": "group diversity", "vendi": "Vendi"}


def values(folder: str) -> dict[str, float]:
    scores = json.loads((Path(folder) / "scores.json").read_text())["metrics"]
    return {name: scores[name]["value"] for name in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="LABEL=DIR[,DIR...]")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, object] = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__}
    print(f"| method | {' | '.join(COLUMNS.values())} |")
    print("| --- " * (len(COLUMNS) + 1) + "|")
    for text in args.methods:
        label, _, folders = text.partition("=")
        found = [values(folder) for folder in folders.split(",")]
        result[label] = found
        table = np.array([list(one.values()) for one in found])
        spread = [f" ± {x:.3f}" for x in table.std(axis=0, ddof=1)] if len(found) > 1 else [""] * table.shape[1]
        print(f"| {label} | {' | '.join(f'{m:.3f}{s}' for m, s in zip(table.mean(axis=0), spread, strict=True))} |")
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
