"""What the playground's reward costs an epoch whose network is on a GPU: judged in a thread, and in processes beside.

    python scripts/benchmarks/verifier.py --out assets/results/rewards_gil.json

The GPU is played by waits: a step of the host takes 2 ms of Python, in which it would queue kernels, and then waits for
25 ms; an epoch of 384 images draws three batches in 8 steps each and takes 24 optimiser steps. A batch is judged as
soon as it is drawn, as a run does it. The images are renderings with noise, other ones in every epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from diffrl_playground import beside
from diffrl_playground.renderer import render
from diffrl_playground.scenes import complete, sample_caption
from diffrl_playground.verifier import Verdict, judged

BATCHES, ROWS, STEPS = 3, 128, 8
Judge = Callable[[np.ndarray, Sequence[str]], Sequence[Verdict] | None]


def images(seed: int) -> tuple[np.ndarray, list[str]]:
    """An epoch's images, uint8 (384, 64, 64, 3), and their prompts."""
    rng = np.random.default_rng(seed)
    captions = [sample_caption(rng, "train", "compositional") for _ in range(BATCHES * ROWS)]
    clean = np.stack([render(complete(caption, rng)) for caption in captions]).astype(np.float64)
    return (clean + 6 * rng.standard_normal(clean.shape)).clip(0, 255).astype(np.uint8), [
        caption.text() for caption in captions
    ]


def step() -> None:
    end = time.perf_counter() + 0.002
    while time.perf_counter() < end:
        pass
    time.sleep(0.025)


def epoch(judge: Judge | None, pixels: np.ndarray, prompts: Sequence[str]) -> float:
    """Seconds of an epoch; without a judge: sampling and optimising alone."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        asked = []
        for batch in range(BATCHES):
            for _ in range(STEPS):
                step()
            mine = slice(batch * ROWS, (batch + 1) * ROWS)
            if judge is not None:
                asked.append(pool.submit(judge, pixels[mine], prompts[mine]))
        assert all(one.result() for one in asked)
    for _ in range(BATCHES * STEPS):
        step()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    others = beside.Beside(arguments.processes)
    others.verify(*images(99))
    seconds: dict[str, list[float]] = {"without": [], "in a thread": [], "in processes": []}
    for number in range(arguments.rounds):
        for name, judge in zip(seconds, (None, judged, others.verify), strict=True):
            seconds[name].append(epoch(judge, *images(10 * number + list(seconds).index(name))))
    others.close()
    alone = sorted(seconds["without"])[arguments.rounds // 2]
    result: dict[str, Any] = {
        "command": "python scripts/benchmarks/verifier.py --out assets/results/rewards_gil.json",
        "cpus": os.cpu_count(),
        "processes": arguments.processes,
        "load": round(os.getloadavg()[0], 1),
        "images of an epoch": BATCHES * ROWS,
        "seconds of an epoch": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "times sampling and optimising": {
            name: round(sorted(values)[arguments.rounds // 2] / alone, 2) for name, values in seconds.items()
        },
    }
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
