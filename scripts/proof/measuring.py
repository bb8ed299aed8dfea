"""One run of the real loop, measured: how fast, how much memory, and how far from what anybody else could write."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from networks import POOL
from references import Recorder, references, wait
from torch import Tensor

from diffrl.config import Config
from diffrl.memory.fit import ENCODING, GIB, Fit
from diffrl.methods.d2align.stage1 import prepare_direction
from diffrl.records.progress import PARTS
from diffrl.run.train import Run

Tell = Callable[[dict[str, Any]], None]  # takes what a part has found so far
TEXT = "train prompt 0"
SPEEDS = ("images_per_second_rollout", "rows_per_second_optimise")


def clean() -> None:
    """Give back what the last run held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def built(config: Config) -> Run:
    """The run, as `train` prepares it."""
    folder = Path(config.run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    run = Run(config)
    prepare_direction(config, folder, run.policy, run.scorer.rewards, run.spec, run.accelerator)
    return run


def speeds(config: Config, epoch: Mapping[str, float]) -> dict[str, float]:
    """Images a second while sampling, rows (images x trained noise levels) a second while optimising."""
    images = config.rollout.images
    rows = images * config.objective_section.trained_steps(config.rollout)
    return {
        "images_per_second_rollout": round(images / epoch["seconds/rollout"], 3),
        "rows_per_second_optimise": round(rows / epoch["seconds/optimise"], 3),
    }


def warm_up(run: Run, config: Config) -> None:
    """Every kernel that an epoch needs has run once: a batch of a rollout, a decoding, a micro-batch."""
    policy, rollout = run.policy, config.rollout

    def inputs(rows: int) -> tuple[Tensor, Tensor, Any]:
        x = torch.randn(rows, *policy.latent_shape, device=policy.device)
        return x, torch.full((rows,), 0.5, device=policy.device), policy.encode([TEXT] * rows)

    rows = config.optimise.micro_batch
    assert isinstance(rows, int), "auto is a number in a run's config"
    with torch.no_grad(), policy.adapter(run.objective.samples_from):
        x = policy.predict(*inputs(rollout.batch_size), guidance=rollout.guidance_scale).x0
        policy.decode(x)
    policy.predict(*inputs(rows), guidance=run.objective.guidance_scale).v.square().mean().backward()
    for _, parameter in policy.trainable:
        parameter.grad = None


def measure(
    config: Config, fit: Fit | None, tell: Tell, *, epochs: int, whole: bool, rates: Mapping[str, float] | None
) -> dict[str, Any]:
    """Speed and its spread over the epochs, peak memory against what doctor counts, where an epoch's seconds go.

    Args:
        epochs: that are timed.
        whole: a whole epoch comes before them; else its kinds of passes once.
        rates: what the device can do, for the three references; None: without them.
    """
    clean()
    cuda, clock = torch.cuda.is_available(), Stopwatch()
    run = built(config)
    found: dict[str, Any] = {"seconds_to_build": clock.lap(), "seconds_to_make_network": POOL.take()}
    beside = POOL.unused(run.policy.backbone.network, run.policy.vae) if cuda else 0
    try:
        run.loop.run_epoch(0) if whole else warm_up(run, run.config)
        found["seconds_to_warm_up"] = clock.lap()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        recorder = Recorder(run)
        lines = []
        for i in range(epochs):
            with recorder:  # keeps the calls of the last epoch
                line = run.loop.run_epoch(1 + i)
            lines.append(line | recorder.seconds)
        found |= _figures(run.config, lines)
        if found["loss"] is None:
            raise RuntimeError("the loss is not finite: figures of a training that trains nothing")
        if cuda:
            # To the KiB: a tiny model's peak is not 0.000, which nothing can be divided by.
            found["peak_gib"] = round((torch.cuda.max_memory_allocated() - beside) / GIB, 6)
        if fit is not None:
            peaks = [size for name, size in fit.peaks.items() if name != ENCODING]  # here are no text encoders
            counted = (sum(fit.parts.values()) + max(peaks)) / GIB
            found |= {"counted_gib": round(counted, 6)}
            found |= {"peak_to_counted": round(found["peak_gib"] / counted, 3)} if cuda else {}
        tell(found)
        if rates is not None:
            found |= references(run, recorder, rates, lambda more: tell(found | more))
    finally:
        run.close()
        run = recorder = None  # type: ignore[assignment]  # whatever was reached
        clean()
    return found


def _figures(config: Config, lines: list[dict[str, float]]) -> dict[str, Any]:
    """Of the timed epochs: medians, how far they are apart, and one epoch second by second."""
    timed = [speeds(config, {f"seconds/{phase}": line[phase] for phase in ("rollout", "optimise")}) for line in lines]
    found: dict[str, Any] = {key: statistics.median(one[key] for one in timed) for key in SPEEDS}
    apart = {key: max(one[key] for one in timed) / min(one[key] for one in timed) for key in SPEEDS}
    best = min(lines, key=lambda line: line["seconds"])
    phases = {name: round(best[name], 3) for name in ("rollout", "optimise", "after")}
    logged = {key: value for key, value in best.items() if key.startswith("seconds/")}
    return found | {
        "images_per_gpu_second": round(config.rollout.images / best["seconds"], 4),
        "images": config.rollout.images,
        "epoch": {"seconds": round(best["seconds"], 3), **phases, **logged},
        "accounted": round(sum(best.get(f"seconds/{name}", 0.0) for name in PARTS) / best["seconds"], 4),
        "spread": round(max(apart.values()), 3),
        "loss": lines[-1]["loss"],
        "rows": config.optimise.micro_batch,
        "batch_size": config.rollout.batch_size,
        "gradient_checkpointing": config.optimise.gradient_checkpointing,
    }


class Stopwatch:
    """Seconds between laps, with the device's work done."""

    def __init__(self) -> None:
        self._mark = self._now()

    def _now(self) -> float:
        if torch.cuda.is_available():
            wait(torch.device("cuda"))
        return time.perf_counter()

    def lap(self) -> float:
        before, self._mark = self._mark, self._now()
        return round(self._mark - before, 2)
