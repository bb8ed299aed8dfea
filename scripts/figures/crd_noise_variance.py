"""What sharing the noise inside a prompt group does to the variance of CRD's gradient (crd.same_noise).

One rollout of the playground is kept fixed; the gradient of one optimiser step is drawn again and again with fresh
timesteps and noise, at the start (theta = old) and after some steps (theta ahead of old). For both settings:

    noise_to_signal   trace of the gradient's covariance over the squared norm of its mean
    cosine            of the two settings' mean gradients, and of two halves of one setting's draws for comparison

OMP_NUM_THREADS=1 python scripts/figures/crd_noise_variance.py --out assets/results/crd_noise.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from diffrl.config import load_config
from diffrl.rollout import Rollout, collect
from diffrl.run.train import Run
from diffrl.trainers.algorithm import Scored, Step, sample_pairs
from diffrl.trainers.crd import CRD


def prepare(groups: int, group_size: int, timesteps: int) -> tuple[Run, Rollout, Tensor]:
    """The shipped recipe at a small size, a rollout of the untrained model, and its advantages."""
    images = groups * group_size
    sizes: dict[str, object] = {
        "rollout.groups": groups,
        "rollout.group_size": group_size,
        "crd.timesteps": timesteps,
        "crd.beta": 0,
    }
    sizes |= {"optimise.batch_size": images, "optimise.accumulation": 1, "watch": "{}", "optimise.ema": 0}
    run = Run(load_config("playground/crd", [f"{key}={value}" for key, value in sizes.items()]))
    prompts = [run.loop.stream.prompts[i] for i in run.loop.stream.batch(0)]
    rollout = collect(
        run.policy, prompts, run.spec, seed=0, epoch=0, group_size=group_size, batch_size=64, snapshot="sampling"
    )
    assert rollout.images is not None
    scores = run.scorer.submit(rollout.images, [prompts[i] for i in rollout.prompt_index.tolist()]).result()
    nothing = torch.zeros(images, 0)
    advantages = run.objective.advantages(
        Scored(scores, torch.ones(1), torch.arange(images) // group_size, nothing, nothing)
    )
    return run, rollout, advantages


def gradient(run: Run, rollout: Rollout, advantages: Tensor, key: int) -> Tensor:
    """(size,) of one optimiser step, whose timesteps and noise are those of `key`; stays in the parameters, too."""
    objective, policy = run.objective, run.policy
    per_sample = objective.rows_per_sample(rollout)
    parts = sample_pairs(torch.arange(rollout.total), per_sample).tensor_split(per_sample)
    run.optimiser.zero_grad()
    objective.before_step(policy, Step(rollout, advantages, parts, (0, key), lambda values: values))
    for part in parts:
        rows = objective.rows(rollout, advantages, part, (0, key))
        run.loop.gradients.add(objective, policy, rows, rollout.total * per_sample, run.loop.scaler)
    return torch.cat([p.grad.flatten() for _, p in policy.trainable if p.grad is not None])


def cosine(a: Tensor, b: Tensor) -> float:
    return round(float(torch.nn.functional.cosine_similarity(a, b, dim=0)), 4)


def measure(run: Run, rollout: Rollout, advantages: Tensor, draws: int, first: int) -> dict[str, object]:
    """Both settings at the weights as they are, with the same timesteps."""
    objective = run.objective
    assert isinstance(objective, CRD)
    result: dict[str, object] = {}
    means = {}
    for name in ("own", "shared"):
        objective.noising.group_noise = name == "shared"
        drawn = torch.stack([gradient(run, rollout, advantages, first + i) for i in range(draws)]).double()
        mean, trace = drawn.mean(0), float(drawn.var(0).sum())
        signal = float(mean.square().sum()) - trace / draws  # without what the noise adds to the mean's norm
        means[name] = mean
        result[name] = {
            "trace_of_covariance": float(f"{trace:.4g}"),
            "squared_norm_of_mean": float(f"{signal:.4g}"),
            "noise_to_signal": round(trace / signal, 3),
            "cosine_of_halves": cosine(drawn[::2].mean(0), drawn[1::2].mean(0)),
        }
    result["cosine_of_means"] = cosine(means["own"], means["shared"])
    objective.noising.group_noise = False
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8, help="prompts")
    parser.add_argument("--group-size", type=int, default=16, help="images per prompt")
    parser.add_argument("--timesteps", type=int, default=2, help="training rows per image")
    parser.add_argument("--draws", type=int, default=24, help="gradients per setting and place")
    parser.add_argument("--steps", type=int, default=8, help="optimiser steps between the two places")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started = time.perf_counter()
    run, rollout, advantages = prepare(args.groups, args.group_size, args.timesteps)
    table: dict[str, object] = {"command": "python " + shlex.join(sys.argv)}
    table |= {key: value for key, value in vars(args).items() if key != "out"}
    table["at the start"] = measure(run, rollout, advantages, args.draws, first=1000)
    for step in range(args.steps):
        gradient(run, rollout, advantages, step)
        run.optimiser.step()
        run.objective.after_step(run.policy, step)
    table[f"after {args.steps} steps"] = measure(run, rollout, advantages, args.draws, first=2000)
    table["seconds"] = round(time.perf_counter() - started)
    run.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
