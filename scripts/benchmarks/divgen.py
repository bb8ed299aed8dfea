"""How long DivGenBench takes on the playground, and whether scoring's memory grows with the number of images.

    python scripts/benchmarks/divgen.py --out assets/results/divgen_cost.json

Runs `diffrl divgen generate` and `diffrl divgen score` as a user would, 3,200 prompts with one image each, and `score`
once more on a quarter of the images. Cores that are shared make the wall time meaningless; the CPU time is reported
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from diffrl import __version__
from diffrl.divgen.observe import MANIFEST


def timed(*words: str) -> dict[str, Any]:
    """Wall and CPU seconds and the peak memory of one command."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "diffrl", "divgen", *words])
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"diffrl divgen {shlex.join(words)} failed")
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    return {key: round(value, 1) for key, value in seconds.items()} | {"peak_mb": round(usage.ru_maxrss / 1024)}


def quarter(folder: Path, target: Path) -> int:
    """A folder with every fourth image of another; returns how many."""
    target.mkdir()
    lines = (folder / MANIFEST).read_text().splitlines()[::4]
    entries = [json.loads(line) for line in lines]
    texts = [json.dumps({**entry, "file": str(folder / entry["file"])}) for entry in entries]
    (target / MANIFEST).write_text("\n".join(texts) + "\n")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="sampling steps")
    parser.add_argument("--limit", type=int, help="the first N prompts only")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    arguments = parser.parse_args()
    limit = ["--limit", str(arguments.limit)] if arguments.limit else []
    with tempfile.TemporaryDirectory() as name:
        folder, part = Path(name) / "images", Path(name) / "quarter"
        options = ["--steps", str(arguments.steps), "--batch-size", "128", *limit]
        result: dict[str, Any] = {
            "command": shlex.join(["python", *sys.argv]),
            "diffrl_version": __version__,
            "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "all"),
            "load_average_before": os.getloadavg()[0],
            "generate": timed("generate", "playground", *options, "--out", str(folder)),
        }
        images = len((folder / MANIFEST).read_text().splitlines())
        result["score"] = timed("score", str(folder)) | {"images": images}
        count = quarter(folder, part)
        result["score_quarter"] = timed("score", str(part), "--world", "playground") | {"images": count}
    print(json.dumps(result, indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
