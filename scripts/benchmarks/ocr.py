"""What the OCR reward reads of rendered text in 5 fonts and 3 sizes, and how fast, with detection and without.

python scripts/benchmarks/ocr.py --out assets/results/ocr_speed.json

Accuracy: words on coloured ground, anywhere in a square image (read with detection), and cut out as a line (read
without). Speed: the same small images read both ways, and larger ones with detection, in turns on two threads; the
cores may be shared with other work: compare rates within one run only, best by the time that the cores were busy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from diffrl import __version__
from diffrl.rewards import load_reward

FONTS = {
    "DejaVu Sans": "DejaVuSans.ttf",
    "DejaVu Serif": "DejaVuSerif.ttf",
    "DejaVu Sans Mono": "DejaVuSansMono.ttf",
    "STIX": "STIXGeneral.ttf",
    "Computer Modern": "cmr10.ttf",
}
SIZES = (20, 32, 56)  # pixels, as a font's size is given: capitals are about 0.7 of it
WORDS = ("OPEN", "coffee", "Exit", "STOP", "Library", "garden", "Hotel", "FRESH", "Welcome", "music", "Bakery", "TAXI")
SHORT = ("OPEN", "Exit", "STOP", "TAXI")
LARGE, SMALL = 0.28, 0.2  # of the image's height: the words fill its width, or lie somewhere in it
PAPERS = ((255, 255, 255), (240, 220, 160), (30, 60, 90), (20, 20, 20))


def picture(word: str, font: str, size: int, rng: np.random.Generator, side: int | None) -> Tensor:
    """(3, H, W) in [0, 1]: the word, somewhere in a square of `side` pixels, or (None) cut out as a line."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / FONTS[font]
    drawn = ImageFont.truetype(str(path), size)
    left, top, right, bottom = drawn.getbbox(word)
    width, height = int(right - left), int(bottom - top)
    paper = PAPERS[rng.integers(len(PAPERS))]
    ink = (10, 10, 40) if sum(paper) > 384 else (250, 250, 235)
    edge = size // 4
    whole = (width + 2 * edge, height + 2 * edge) if side is None else (side, side)
    x, y = (
        int(rng.integers(edge, max(outer - inner - edge, edge) + 1))
        for outer, inner in zip(whole, (width, height), strict=True)
    )
    image = Image.new("RGB", whole, paper)
    ImageDraw.Draw(image).text((x - left, y - top), word, ink, drawn)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def accuracy(side: int, words: int, threads: int, seed: int = 0) -> dict[str, Any]:
    """Share of exact readings by font and size, with detection in squares and without on lines."""
    readers = {
        "detection": load_reward("ocr", detect=True, threads=threads),
        "line": load_reward("ocr", detect=False, threads=threads),
    }
    rng, table = np.random.default_rng(seed), {}
    for kind, reader in readers.items():
        rows: dict[str, dict[str, float]] = {}
        for font in FONTS:
            for size in SIZES:
                scores = []
                for word in WORDS[:words]:
                    image = picture(word, font, size, rng, side if kind == "detection" else None)
                    scores.append(reader(image[None], [f'a sign "{word}"'], [{}]).item())
                rows.setdefault(font, {})[str(size)] = round(float(np.mean([score == 1.0 for score in scores])), 3)
        every = [value for row in rows.values() for value in row.values()]
        table[kind] = {"exact": round(float(np.mean(every)), 3), "by font and size": rows}
    return table


def speed(threads: int, batch: int, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Median images a second of each way to read, all ways in every round."""
    rng = np.random.default_rng(seed)
    words = [SHORT[i % len(SHORT)] for i in range(batch)]
    fonts = [list(FONTS)[i % len(FONTS)] for i in range(batch)]
    sets = {
        (side, share): torch.stack(
            [picture(*pair, int(share * side), rng, side) for pair in zip(words, fonts, strict=True)]
        )
        for side, share in ((64, LARGE), (128, LARGE), (64, SMALL), (128, SMALL), (256, SMALL), (512, SMALL))
    }
    prompts: list[str] = [f'a sign "{word}"' for word in words]
    alone: dict[str, Any] = {"detect": False}
    found: dict[str, Any] = {"detect": True}
    ways = {
        "64 x 64, large words, recognition only": (64, LARGE, alone),
        "64 x 64, large words, with detection": (64, LARGE, found),
        "128 x 128, large words, recognition only": (128, LARGE, alone),
        "128 x 128, large words, with detection": (128, LARGE, found),
        "128 x 128, small words, recognition only": (128, SMALL, alone),
        "128 x 128, small words, with detection": (128, SMALL, found),
        "256 x 256, small words, with detection": (256, SMALL, found),
        "256 x 256, small words, detection at 736 (RapidOCR's default)": (256, SMALL, found | {"resize": 736}),
        "512 x 512, small words, with detection": (512, SMALL, found),
    }
    readers = {way: load_reward("ocr", threads=threads, **params) for way, (_, _, params) in ways.items()}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}  # of the clock, of the cores
    exact: dict[str, float] = {}
    for turn in range(rounds + 1):  # the first one warms up
        for way, (side, share, _) in ways.items():
            start, busy = time.perf_counter(), time.process_time()
            scores = readers[way](sets[side, share], prompts, [{}] * batch)
            if turn:
                seconds[way].append((time.perf_counter() - start, time.process_time() - busy))
            exact[way] = round((scores == 1.0).float().mean().item(), 3)
    wall, cores = ({way: statistics.median(row[i] for row in rows) for way, rows in seconds.items()} for i in (0, 1))
    slow, fast = (way for way in ways if way.startswith("256"))
    ratio = {
        f"{size}: recognition only against detection": (f"{size}, with detection", f"{size}, recognition only")
        for size in ("64 x 64, large words", "128 x 128, large words")
    } | {"256 x 256: detection at its own size against RapidOCR's default": (fast, slow)}
    return {
        "threads": threads,
        "batch": batch,
        "images a second": {way: round(batch / value, 2) for way, value in wall.items()},
        "images a second of one core's time": {way: round(batch / value, 2) for way, value in cores.items()},
        "exact": exact,
        "times faster, by the cores' time": {key: round(cores[a] / cores[b], 1) for key, (a, b) in ratio.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/results/ocr_speed.json"))
    parser.add_argument("--side", type=int, default=256, help="pixels of the square images")
    parser.add_argument("--words", type=int, default=len(WORDS), help="words for each font and size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = " ".join(f"--{key} {getattr(args, key)}" for key in ("side", "words", "threads", "batch", "rounds"))
    result = {
        "command": f"python scripts/benchmarks/ocr.py {options}",
        "diffrl_version": __version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "accuracy": accuracy(args.side, args.words, args.threads),
        "speed": speed(args.threads, args.batch, args.rounds),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
