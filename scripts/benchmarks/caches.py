"""What `rollout.cache` saves and what it costs, on the playground: images with and without it from the same noise.

    OMP_NUM_THREADS=1 python scripts/benchmarks/caches.py --out assets/results/caches.json

`speed`: seconds of the exact batches over those of the cached ones, in pairs that take turns (median), the
process's own CPU time, forwards and steps only. For each reward: its mean with and without, and the correlation of the
two scores over the images `within` the groups of one prompt, which is what advantages are made of.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl import __version__
from diffrl.policy import load_policy
from diffrl.policy.caching import CacheSpec
from diffrl.prompts import load_prompts
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec, collect

CACHES = {
    "taylorseer, every 2nd step": CacheSpec("taylorseer", interval=2),
    "taylorseer, every 3rd step": CacheSpec("taylorseer", interval=3),
    "pyramid, every 2nd step": CacheSpec("pyramid", interval=2),
    "pyramid, every 3rd step": CacheSpec("pyramid", interval=3),
}
REWARDS = ("playground", "clip", "aesthetic")


def correlation(a: Tensor, b: Tensor) -> float:
    both = torch.stack([a.flatten(), b.flatten()]).double()
    return round(float(torch.corrcoef(both)[0, 1]), 4)


def table(result: dict[str, Any]) -> str:
    """What caches of diffusers save in a rollout, and what they do to its rewards."""
    heads = [f"{name}: correlation in groups, mean" for name in REWARDS]
    lines = [f"| cache | speed | {' | '.join(heads)} |", "| --- " * (len(REWARDS) + 2) + "|"]
    for name, row in result["caches"].items():
        cells = [f"{row[key]['within']:.2f}, {row[key]['exact']:.3f} → {row[key]['cached']:.3f}" for key in REWARDS]
        lines.append(f"| {name} | {row['speed']:.2f} | {' | '.join(cells)} |")
    setting = f"{result['images']} images, {result['steps']} steps, {result['machine']}"
    return "\n".join(lines) + f"\n\n`{result['command']}`, {setting}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="images per prompt")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    clock, device = time.process_time, torch.device("cpu")
    policy = load_policy("playground", device=device)
    prompts = load_prompts("playground/compositional/test")[: args.prompts]
    scorer = Scorer(build_rewards({name: Entry(name, {}) for name in REWARDS}, device))
    owners = [prompt for prompt in prompts for _ in range(args.group)]
    spec = SamplerSpec(sampler="dpm2", steps=args.steps)

    def sample(cache: CacheSpec | None) -> tuple[float, Tensor]:
        """Seconds, scores (P, G, K)."""
        policy._rollouts = None
        if cache is not None:
            policy.cache_rollouts(cache, policy.timesteps(args.steps).tolist())
        seconds, mark, scores = 0.0, clock(), []

        def on_batch(images: Tensor, part: slice) -> None:
            nonlocal seconds, mark
            seconds += clock() - mark
            scores.append(scorer.submit(images, owners[part]).result())
            mark = clock()

        settings: dict[str, Any] = {"seed": 0, "epoch": 0, "group_size": args.group, "batch_size": 64}
        settings |= {"keep_images": False, "on_batch": on_batch, "caching": policy.cached}
        collect(policy, prompts, spec, **settings)
        return seconds, torch.cat(scores).view(len(prompts), args.group, -1)

    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__}
    result |= {"machine": f"{platform.machine()} CPU"}
    result |= {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__, "seed": 0}
    result |= {"load": round(os.getloadavg()[0], 1), "images": len(owners), "steps": args.steps, "caches": {}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sample(None)  # prompts are encoded, pages are there
    for name, cache in CACHES.items():
        pairs = [(sample(None), sample(cache)) for _ in range(args.repeats)]
        (_, before), (_, after) = pairs[0]
        entry: dict[str, Any] = {"speed": round(statistics.median(a[0] / b[0] for a, b in pairs), 3)}
        for column, reward in enumerate(REWARDS):
            one, two = before[..., column], after[..., column]
            apart = [scores - scores.mean(1, keepdim=True) for scores in (one, two)]
            entry[reward] = {"exact": round(float(one.mean()), 4), "cached": round(float(two.mean()), 4)}
            entry[reward]["within"] = correlation(*apart)
        result["caches"][name] = entry
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
