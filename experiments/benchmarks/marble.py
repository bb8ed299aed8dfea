"""What balancing K rewards costs in the optimise phase: time beside the weighted sum's, in one run, on a CPU.

OMP_NUM_THREADS=1 python -m experiments.benchmarks.marble --out assets/results/marble_cost.json

`--model sd35` is a transformer of SD3.5-Medium's width with random weights; its blocks are alike, so a few of them have
the ratios of all. On a GPU `scripts/gpu_proof.py` trains with 5 and with 50 rewards.
A step is forwards (of the trained LoRA and of old, which lags), losses, backward passes, the QP, clipping and AdamW, on
random rows.
Variants take turns, so that a machine that slows down slows all of them; times are medians, of the process's own CPU
time: wall time with one thread on a free core. `speed` is the weighted sum's time over the variant's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch import nn

from diffrl.families.sd3 import SD3
from diffrl.methods.grpo.objective import GRPO
from diffrl.methods.marble.combiner import Marble
from diffrl.methods.nft.objective import NFT
from diffrl.methods.shared.spatial import SpatialRows
from diffrl.methods.shared.steps import StepRows
from diffrl.objectives.gradients import Gradients, SumOfLosses
from diffrl.objectives.objective import Objective
from diffrl.objectives.rows import Rows
from diffrl.policy import Conditioning, LoraSpec, Policy, load_policy
from diffrl.resources import shipped
from diffrl.rollout import SamplerSpec
from diffrl.samplers import gaussian_log_prob, sde_kernel
from experiments import command

EVERY = 10
SD35_MEDIUM = shipped("assets", "architectures", "stable-diffusion-3.5-medium")


def build_policy(args: argparse.Namespace) -> tuple[Policy, Conditioning]:
    """The policy, with a LoRA that is not zero, and one row of conditioning."""
    if args.model == "playground":
        policy = load_policy("playground", device="cpu")
        cond = policy.encode(["a red circle on white"])
    else:
        config = json.loads((SD35_MEDIUM / "transformer" / "config.json").read_text())
        config |= {"num_layers": args.layers, "dual_attention_layers": list(range(min(args.layers, 13)))}
        network: Any = SD3Transformer2DModel.from_config(config)
        cond = Conditioning(torch.randn(1, 333, 4096), torch.randn(1, 2048))
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        vae: Any = nn.Identity()
        vae.config = SimpleNamespace(block_out_channels=(0, 0, 0, 0))  # 8 pixels a latent
        pipe = SimpleNamespace(transformer=network, vae=vae, scheduler=scheduler, tokenizer_max_length=77)
        backbone: Any = SD3(pipe, resolution=args.resolution)
        policy = Policy(backbone, lora=LoraSpec(), device=torch.device("cpu"))
    with torch.no_grad():
        for _, parameter in policy.trainable:
            parameter.normal_(std=0.01)
    return policy, cond


def build_objective(name: str, policy: Policy) -> Objective:
    if name == "grpo":
        return GRPO(SamplerSpec(sampler="flow_sde", steps=10, noise_level=0.7), beta=0.0, clip=0.2)
    policy.add_snapshot("old")
    objective = NFT(beta=0.0, b=0.1)
    objective.on_policy = False
    with torch.no_grad():
        for parameter in policy.lora.parameters["old"]:
            parameter.mul_(0.9)
    return objective


def random_rows(policy: Policy, cond: Conditioning, objective: Objective, count: int, rewards: int) -> Rows:
    x0, eps = (torch.randn(count, *policy.latent_shape) for _ in range(2))
    t = torch.linspace(0.9, 0.2, count)
    rows = Rows(
        x0=x0,
        x_t=policy.process.add_noise(x0, eps, t),
        t=t,
        cond=cond.expand(count),
        advantages=torch.randn(count, rewards),
        groups=torch.zeros(count, dtype=torch.int64),
        on_policy=False,
        pairs=torch.zeros(count, 2, dtype=torch.int64),
    )
    if isinstance(objective, GRPO):
        t_next = t - 0.1
        with torch.no_grad():
            prediction = policy.predict(rows.x_t, t, rows.cond)
            mean, std = sde_kernel("flow_sde", rows.x_t, prediction, t, t_next, 0.7, 0.9, policy.process)
            x_next = mean + std * eps
            log_prob = gaussian_log_prob(x_next, mean, std)
        return StepRows(**vars(rows), x_next=x_next, t_next=t_next, t_second=0.9, log_prob=log_prob)
    return SpatialRows(**vars(rows))


class Bench:
    """Steps of one policy and objective, with whatever gradients."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.policy, self.cond = build_policy(args)
        self.objective = build_objective(args.objective, self.policy)
        self.parameters = [parameter for _, parameter in self.policy.trainable]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.rows: dict[int, Rows] = {}

    def step(self, gradients: Gradients, rewards: int) -> float:
        """Seconds of an optimiser step."""
        if rewards not in self.rows:
            self.rows[rewards] = random_rows(self.policy, self.cond, self.objective, self.args.rows, rewards)
        rows = self.rows[rewards]
        mark = time.process_time()
        for _ in range(self.args.parts):
            gradients.add(self.objective, self.policy, rows, self.args.rows * self.args.parts, self.scaler)
        gradients.finish(self.parameters, None)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        taken = time.process_time() - mark
        self.objective.metrics()
        return taken


def variants(rewards: int) -> dict[str, tuple[Gradients, int]]:
    """Gradients and columns of advantages; amortised is the mean of its solving step and nine others."""
    names = [str(k) for k in range(rewards)]
    table: dict[str, tuple[Gradients, int]] = {"weighted_sum": (SumOfLosses(), 1)}
    for name, mode in (("constant_cost", "fresh"), ("one_pass", "amortised"), ("k_passes", "full")):
        table[name] = (Marble(names, mode=mode, every=10**9), rewards)  # type: ignore[arg-type]
    table["one_pass"][0].load_state_dict({"ema": [1 / rewards] * rewards, "steps": 1})
    return table


def measure(bench: Bench, rewards: int) -> dict[str, Any]:
    args, table = bench.args, variants(rewards)
    if args.most_passes < rewards:
        del table["k_passes"]
    seconds: dict[str, list[float]] = {name: [] for name in table}
    for gradients, columns in table.values():
        bench.step(gradients, columns)  # warm up
    for _ in range(args.repeats):
        for name, (gradients, columns) in table.items():
            seconds[name].append(bench.step(gradients, columns))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    median["amortised_10"] = (median["constant_cost"] + (EVERY - 1) * median.pop("one_pass")) / EVERY
    base = median["weighted_sum"]
    return {
        name: {"seconds": round(median[name], 4), "speed": round(base / median[name], 3)}
        for name in ("weighted_sum", "amortised_10", "constant_cost", "k_passes")
        if name in median
    }


def table(result: dict[str, Any], *variants: str) -> str:
    """Speed of ways to balance K rewards against the weighted sum."""
    lines = [f"| rewards | {' | '.join(variants)} |", "| --- " * (len(variants) + 1) + "|"]
    for number, ways in result["rewards"].items():
        cells = [f"{ways[name]['speed']:.2f}" if name in ways else "not run" for name in variants]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["playground", "sd35"], default="playground")
    parser.add_argument("--layers", type=int, default=24, help="of sd35: fewer show the same ratios in less time")
    parser.add_argument("--resolution", type=int, default=512, help="of sd35, pixels")
    parser.add_argument("--objective", choices=["nft", "grpo"], default="nft")
    parser.add_argument("--rewards", type=int, nargs="+", default=[2, 5, 10, 50])
    parser.add_argument("--rows", type=int, default=64, help="rows of a micro-batch")
    parser.add_argument("--parts", type=int, default=2, help="micro-batches of an optimiser step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most-passes", type=int, default=10**9, help="leave K passes out above so many rewards")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(args)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "rewards")}
    result: dict[str, Any] = {"command": command(), "device": f"{platform.machine()} CPU"}
    result |= {"threads": torch.get_num_threads(), "load": os.getloadavg()[0], "torch": torch.__version__}
    result |= {"lora": sum(p.numel() for p in bench.parameters), **settings, "rewards": {}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for rewards in args.rewards:
        result["rewards"][str(rewards)] = measure(bench, rewards)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(rewards, json.dumps(result["rewards"][str(rewards)]), flush=True)


if __name__ == "__main__":
    main()
