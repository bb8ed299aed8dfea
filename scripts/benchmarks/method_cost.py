"""What an epoch of each method, or with each engine option, costs beside its base, on the playground, in one run.

    OMP_NUM_THREADS=1 python scripts/benchmarks/method_cost.py --out assets/results/method_cost.json
    OMP_NUM_THREADS=1 python scripts/benchmarks/method_cost.py --options --out assets/results/options.json

Every recipe of `METHODS` and its base, or NFT's with each of `OPTIONS`, draw, score and train the same number of images
a round, one after the other; a ratio is the median over the rounds of the method's seconds by its base's in the same
round. `forwards`: of the network in the rollout, by images. Levels are not calibrated (`dense.calibrate`), which is
paid once before a training. `mib`: of a training micro-batch, as `diffrl doctor` counts it. `first`: seconds of
the first epoch, in which blocks are compiled. What options give on a GPU
is measured by `scripts/gpu_proof.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffrl import __version__
from diffrl.config import load_config
from diffrl.memory.fit import estimate
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
OPTIONS = {
    "gradient checkpointing": ["optimise.gradient_checkpointing=true"],
    "bf16": ["optimise.precision=bf16"],
    "micro-batches of half the size": ["optimise.micro_batch=0.5"],
    "LoRA on queries and values": ["lora.targets=[attn.to_q,attn.to_v]"],
    "compiled blocks": ["engine.compile=true"],
}
PHASES = ("rollout", "reward", "optimise")


def opened(name: str, groups: int, folder: Path, options: Sequence[str] = ()) -> Run:
    values = [f"rollout.groups={groups}", f"run_dir={folder}", *options]
    values += ["dense.calibrate=null"] if name == "dense" else []
    return Run(load_config(ROOT / f"configs/playground/{name}.yaml", values))


def measure(runs: dict[str, Run], turns: int) -> dict[str, list[dict[str, Any]]]:
    """An epoch of each run in turn, so many times."""
    epochs: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for turn in range(turns):
        for name, run in runs.items():
            epochs[name].append(run.loop.run_epoch(turn))
    return epochs


def compared(epochs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = list(zip(epochs, base, strict=True))
    row: dict[str, Any] = {"epoch": round(statistics.median(e["seconds"] / b["seconds"] for e, b in pairs), 3)}
    for phase in PHASES:
        key = f"seconds/{phase}"
        row[phase] = round(statistics.median(e[key] / b[key] for e, b in pairs), 3)
    row["seconds"] = round(statistics.median(e["seconds"] for e in epochs), 2)
    return row | {"forwards": epochs[0]["rollout/forwards"]}


def counted_mib(run: Run) -> float:
    """MiB of a training micro-batch."""
    return round(
        max(size for name, size in estimate(run.config).peaks.items() if name.startswith("training")) / 2**20, 1
    )


def table(result: dict[str, Any]) -> str:
    """What each option gives beside the plain run."""
    heads = "| option | sampling | optimising | MiB of a training micro-batch, counted | seconds of the first epoch |"
    lines = [heads, "| --- " * 5 + "|"]
    for name, row in result["options"].items():
        speeds = " | ".join(f"{1 / row[phase]:.2f}" for phase in ("rollout", "optimise"))
        lines.append(f"| {name} | {speeds} | {row['mib']:g} | {row['first']:g} |")
    return "\n".join(lines) + f"\n\n`{result['command']}`, {result['machine']}, torch {result['torch']}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=6, help="prompts of an epoch, 16 images each")
    parser.add_argument("--warm", type=int, default=1, help="rounds before the measured ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--options", action="store_true", help="NFT's recipe with engine options, in place of methods")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "diffrl_version": __version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "images": args.groups * 16,
    }
    sets: dict[str, Iterable[str]] = {"none": OPTIONS} if args.options else dict(METHODS)
    rows = result["options" if args.options else "methods"] = {}
    for base, names in sets.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = {}
            for name in (base, *names):
                recipe, options = ("nft", OPTIONS.get(name, [])) if args.options else (name, [])
                runs[name] = opened(recipe, args.groups, Path(folder) / name, options)
            epochs = measure(runs, args.warm + args.repeats)
            for name, run in runs.items():
                more = {"mib": counted_mib(run)} if args.options else {"base": base}
                row = rows[name] = more | compared(epochs[name][args.warm :], epochs[base][args.warm :])
                row["first"] = round(epochs[name][0]["seconds"], 1)
                print(f"{name:<34} {rows[name]}", flush=True)
                run.close()
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
