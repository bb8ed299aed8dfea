"""The README's table of what training does on the playground: base > trained, from results of `scripts/reproduce.py`.

python scripts/figures/base_table.py            # writes it into README.md, between its two marks
python scripts/figures/base_table.py --print
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
ROWS = {"nft": "playground", "grpo": "playground", "ocr": "ocr"}  # result, and the reward that it trains
COLUMNS = {"facts right": "strict", "all facts right": "all_right", "variety": "variety", "artefact": "artefact"}
MARKS = re.compile(r"(<!-- scripts/figures/base_table.py -->\n).*?(<!-- end of the table -->)", re.DOTALL)


def cell(runs: list[dict[str, Any]], name: str) -> str:
    """Base > trained ± deviation between the seeds; empty where it was not measured."""
    if name not in runs[0]["after"]:
        return ""
    before, after = (np.array([run[side][name] for run in runs]) for side in ("before", "after"))
    return f"{before.mean():.3f} > {after.mean():.3f} ± {after.std(ddof=1):.3f}"


def table(folder: Path = RESULTS) -> str:
    """Markdown; every row is the mean over the result's seeds."""
    lines = [f"| recipe | images | minutes | reward | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 4) + "|"]
    for name, reward in ROWS.items():
        runs = json.loads((folder / f"{name}.json").read_text())["runs"]
        minutes = np.mean([run["training_seconds"] for run in runs]) / 60
        cells = " | ".join(cell(runs, column) for column in COLUMNS.values())
        label = f"`playground/{name}` | {runs[0]['images']:,} | {minutes:.0f}"
        lines.append(f"| {label} | {reward} {cell(runs, reward)} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print it only")
    if parser.parse_args().print:
        print(table())
        return
    readme = ROOT / "README.md"
    text, found = MARKS.subn(lambda match: match[1] + table() + match[2], readme.read_text())
    if found != 1:
        raise SystemExit("base_table: README.md has no place for it")
    readme.write_text(text)


if __name__ == "__main__":
    main()
