"""What `engine.compile` costs at the start, alone and from the cache on the disk, and when it has paid.

OMP_NUM_THREADS=1 python scripts/benchmarks/compiling.py --out assets/results/compiling.json

One process each: without compiling, compiled with an empty cache, compiled with what that one left on the disk (torch's
own cache, in TORCHINDUCTOR_CACHE_DIR), and under MARBLE, which takes gradients out of the LoRA layers. An epoch is that
of NFT's recipe for the playground: a rollout's forwards without gradient, and optimiser steps. `graphs` are those that
the compiler made, `breaks` the reasons why a block became several, with their number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from marble import build_objective, build_policy, random_rows

from diffrl.policy.engine import compile_blocks
from diffrl.trainers.algorithm import SumOfLosses
from diffrl.trainers.marble import Marble

REWARDS = 5
MODES = ("plain", "compiled, empty cache", "compiled, from the cache", "MARBLE", "MARBLE, compiled, from the cache")


def one(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first and of later forwards and steps of this process."""
    torch.manual_seed(0)
    policy, cond = build_policy(argparse.Namespace(model="playground"))
    objective = build_objective("nft", policy)
    marble = mode.startswith("MARBLE")
    rows = random_rows(policy, cond, objective, args.rows, REWARDS if marble else 1)
    balanced = Marble([str(k) for k in range(REWARDS)], mode="fresh")
    gradients = balanced if marble else SumOfLosses()
    parameters = [parameter for _, parameter in policy.trainable]
    optimiser = torch.optim.AdamW(parameters, lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batch = cond.expand(args.batch)
    x, t = torch.randn(args.batch, *policy.latent_shape), torch.full((args.batch,), 0.5)
    if "compiled" in mode:
        compile_blocks(policy.backbone.network)

    def sample() -> None:
        with torch.no_grad(), policy.using("old"):
            policy.predict(x, t, batch)

    def step() -> None:
        gradients.add(objective, policy, rows, args.rows, scaler)
        gradients.finish(parameters, None)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    result: dict[str, Any] = {}
    for name, work in (("forward", sample), ("step", step)):
        result[f"first {name}"] = _seconds(work)
        result[name] = statistics.median(_seconds(work) for _ in range(args.repeats))
    if "compiled" in mode:
        counters = torch._dynamo.utils.counters  # type: ignore[attr-defined]
        result["graphs"] = counters["stats"]["unique_graphs"]
        result["breaks"] = dict(counters["graph_break"])
    return result


def _seconds(work: Callable[[], None]) -> float:
    mark = time.perf_counter()
    work()
    return round(time.perf_counter() - mark, 4)


def compared(modes: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """Add what compiling costs at the start, and the epochs after which it has paid."""
    forwards, steps = args.images * args.steps / args.batch, args.images * args.trained / args.rows
    for mode, row in modes.items():
        if "compiled" not in mode:
            continue
        base = modes["MARBLE" if mode.startswith("MARBLE") else "plain"]
        row["seconds to compile"] = round(row["first forward"] + row["first step"] - row["forward"] - row["step"], 1)
        row["speed of a forward"] = round(base["forward"] / row["forward"], 3)
        row["speed of a step"] = round(base["step"] / row["step"], 3)
        gain = forwards * (base["forward"] - row["forward"]) + steps * (base["step"] - row["step"])
        row["epochs until it has paid"] = round(row["seconds to compile"] / gain, 1) if gain > 0 else None


def table(result: dict[str, Any]) -> str:
    """What compiled blocks cost at the start and gain later."""
    lines = ["| | seconds to compile | forward, step | epochs until it has paid | graphs, breaks |", "| --- " * 5 + "|"]
    for mode, row in result["modes"].items():
        if "graphs" in row:
            paid = row["epochs until it has paid"]
            breaks = sum(row["breaks"].values())
            speed = f"{row['speed of a forward']:.2f}, {row['speed of a step']:.2f}"
            paid = "never" if paid is None else paid
            cells = (row["seconds to compile"], speed, paid, f"{row['graphs']}, {breaks}")
            lines.append(f"| {mode} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + f"\n\n`{result['command']}`, {result['device']}, torch {result['torch']}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48, help="rows of an optimiser step's micro-batch")
    parser.add_argument("--batch", type=int, default=128, help="images of a rollout's forward")
    parser.add_argument("--images", type=int, default=384, help="of an epoch")
    parser.add_argument("--steps", type=int, default=6, help="of a rollout")
    parser.add_argument("--trained", type=int, default=2, help="timesteps of an image that are trained")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mode", choices=MODES, help="this one alone, in this process")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(one(args.mode, args)))
        return
    if args.out is None:
        parser.error("--out FILE.json is needed")
    modes = {}
    with tempfile.TemporaryDirectory() as cache:
        for mode in MODES:
            command = [sys.executable, *sys.argv, "--mode", mode]
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            if mode.startswith("MARBLE, compiled"):  # its graphs are others: the first process fills the cache
                subprocess.run(command, check=True, capture_output=True, env=environment)
            printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            modes[mode] = json.loads(printed.splitlines()[-1])
            print(mode, modes[mode], flush=True)
    compared(modes, args)
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "torch": torch.__version__}
    result |= {"device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads", "load": os.getloadavg()[0]}
    result |= {key: value for key, value in vars(args).items() if key not in ("mode", "out")} | {"modes": modes}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
