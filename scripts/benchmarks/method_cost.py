"""What an epoch of each method costs beside its base, on the playground, in one run.

    OMP_NUM_THREADS=1 python scripts/benchmarks/method_cost.py --out assets/results/method_cost.json

Every recipe of `METHODS` and its base draw, score and train the same number of images a round, one after the other; a
ratio is the median over the rounds of the method's seconds by its base's in the same round. `forwards`: of the network
in the rollout, by images. Levels are not calibrated (`dense.calibrate`), which is paid once before a training.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from diffrl import __version__
from diffrl.config import load_config
from diffrl.run.train import Run

ROOT = Path(__file__).resolve().parents[2]
METHODS = {
    "nft": ("dpo", "rwr", "sft", "gdro", "qma", "awm", "dgpo", "nft_scout"),
    "grpo": (
        "prdp",
        "mixgrpo",
        "tempflow",
        "branch",
        "g2rpo",
        "tempflow_branches",
        "dense",
        "hicogen_noise",
        "renoise",
    ),
}
PHASES = ("rollout", "reward", "optimise")


def opened(name: str, groups: int, folder: Path) -> Run:
    values = [f"rollout.groups={groups}", f"run_dir={folder / name}"]
    values += ["dense.calibrate=null"] if name == "dense" else []
    return Run(load_config(ROOT / f"configs/playground/{name}.yaml", values))


def measure(runs: dict[str, Run], warm: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """An epoch of each run in turn, `repeats` times after `warm`."""
    epochs: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for turn in range(warm + repeats):
        for name, run in runs.items():
            epoch = run.loop.run_epoch(turn)
            if turn >= warm:
                epochs[name].append(epoch)
    return epochs


def compared(epochs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = list(zip(epochs, base, strict=True))
    row: dict[str, Any] = {"epoch": round(statistics.median(e["seconds"] / b["seconds"] for e, b in pairs), 3)}
    for phase in PHASES:
        key = f"seconds/{phase}"
        row[phase] = round(statistics.median(e[key] / b[key] for e, b in pairs), 3)
    row["seconds"] = round(statistics.median(e["seconds"] for e in epochs), 2)
    return row | {"forwards": epochs[0]["rollout/forwards"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=6, help="prompts of an epoch, 16 images each")
    parser.add_argument("--warm", type=int, default=1, help="rounds before the measured ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "diffrl_version": __version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "images": args.groups * 16,
        "methods": {},
    }
    for base, names in METHODS.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = {name: opened(name, args.groups, Path(folder)) for name in (base, *names)}
            epochs = measure(runs, args.warm, args.repeats)
            for run in runs.values():
                run.close()
        for name in (base, *names):
            result["methods"][name] = {"base": base} | compared(epochs[name], epochs[base])
            print(f"{name:<18} {result['methods'][name]}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
