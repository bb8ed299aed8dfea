"""How long does `diffrl divgen score` take for 5,000 pictures, the first time and again, and how long did it take?

    python scripts/benchmarks/divgen.py --against OLD_CHECKOUT --out assets/results/divgen_time.json

Pictures are drawn here: 512 x 512, four of each prompt, a manifest beside them. The checkouts take turns; a turn is a
process of its own, its features the playground's CLIP on one thread. Clock and processor time, in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["--features", "clip", *(f"--{kind}=none" for kind in ("identity", "style", "layout", "lpips"))]


def pictures(folder: Path, count: int, side: int) -> None:
    """Smooth colours with a little noise: they are packed about as photographs are."""
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        pixels = np.asarray(small.resize((side, side), Image.Resampling.BICUBIC), np.int16)
        pixels = np.clip(pixels + rng.integers(-4, 5, pixels.shape, dtype=np.int16), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:05d}.png", compress_level=1)
        rows.append(json.dumps({"file": f"{i:05d}.png", "prompt": f"prompt {i // 4}", "member": i % 4}))
    (folder / "manifest.jsonl").write_text("\n".join(rows) + "\n")


def scored(folder: Path, checkout: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "diffrl", "divgen", "score", str(folder), *WORDS, "--device", "cpu"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, cwd=checkout, env=environment, check=True, capture_output=True)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"clock": round(seconds, 1), "processor": round(processor, 1)}


def commit(checkout: Path) -> str:
    words = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="a checkout of an older commit")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    turns: dict[str, list[dict[str, float]]] = {"before": [], "now": [], "now again": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pictures(folder, args.images, args.side)
        size = sum(path.stat().st_size for path in folder.glob("*.png"))
        for _ in range(args.turns):
            for name, checkout in (("before", args.against.resolve()), ("now", ROOT), ("now again", ROOT)):
                turns[name].append(scored(folder, checkout))
                print(name, turns[name][-1], flush=True)
            (folder / "features.sqlite").unlink()
    middle = {
        name: {k: statistics.median(turn[k] for turn in found) for k in found[0]} for name, found in turns.items()
    }
    result = {
        "command": " ".join(["python scripts/benchmarks/divgen.py", *sys.argv[1:]]),
        "commits": {"before": commit(args.against), "now": commit(ROOT)},
        "images": args.images,
        "side": args.side,
        "bytes": size,
        "cores": os.cpu_count(),
        "load at the end": round(os.getloadavg()[0], 1),
        "turns": turns,
        "median": middle,
        "ratio": {k: round(middle["now"][k] / middle["before"][k], 3) for k in middle["now"]},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
