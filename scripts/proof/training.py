"""Epochs of the real loop on networks of true size: how fast, how much memory, how far from the bare loop.

The model is a published architecture with random weights (`scripts/benchmarks/random_weights.py`); config and `Run` are
the package's own. Tiny: the conformance suite's little pipelines in the place of the published ones.
"""

from __future__ import annotations

import gc
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from bare import Recorder

from diffrl.config import Config, load_config
from diffrl.conformance.tinies import make
from diffrl.conformance.tiny import tiny_flux, tiny_sd3
from diffrl.errors import UserError
from diffrl.run.advice import advise
from diffrl.run.direction import prepare_direction
from diffrl.run.fit import GIB, Fit, estimate
from diffrl.run.train import Run

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ROOT / "scripts" / "benchmarks" / "random_weights.py"
REWARDS = ROOT / "scripts" / "proof" / "proof_rewards.py"
STEPS, TRAINED = 4, 2  # sampling steps, and how many noise levels of an image are trained


@dataclass(frozen=True)
class Model:
    """A published architecture, its family, its little stand-in, and the size of an epoch."""

    architecture: str
    family: str
    tiny: Callable[[Path], Path]
    group: int  # images per prompt; an epoch has two prompts, and one optimiser step
    rows: int  # of a micro-batch
    seconds: float  # that the parts on it take about


MODELS = {
    "sd35": Model("stable-diffusion-3.5-medium", "SD3", tiny_sd3, 16, 16, 45.0),
    "flux": Model("FLUX.1-dev", "Flux", tiny_flux, 8, 4, 110.0),
    "qwen": Model("Qwen-Image", "QwenImage", lambda folder: make("qwen-image", folder), 8, 4, 180.0),
}


def patches(count: int) -> dict[str, Any]:
    """So many rewards."""
    return {f"patch{i}": {"plugin": f"{REWARDS}:Patch", "number": i} for i in range(count)}


SDE = {"sampler": "flow_sde", "window": TRAINED, "same_noise": True}
NFT: dict[str, Any] = {"objective": "nft", "nft": {"timesteps": TRAINED}, "rewards": patches(1)}
METHODS: dict[str, dict[str, Any]] = {
    "nft": NFT,
    "grpo": {"objective": "grpo", "grpo": {"beta": 0.04}, "rollout": SDE, "rewards": patches(1)},
    "crd": {"objective": "crd", "crd": {"timesteps": TRAINED}, "rewards": patches(1)},
    "gardo": {
        "objective": "grpo",
        "grpo": {"beta": 0.04},
        "gardo": {"auxiliary": ["other"]},
        "rollout": SDE,
        "rewards": patches(1),
        "watch": {"other": {"plugin": f"{REWARDS}:Patch", "number": 99}},
    },
    "marble-5": NFT | {"marble": {"mode": "fresh"}, "rewards": patches(5)},
    "marble-50": NFT | {"marble": {"mode": "fresh"}, "rewards": patches(50)},
    "d2align": {
        "objective": "direct",
        "direct": {"decode_chunk": 4, "checkpoint_decoder": True},
        "d2align": {"steps": 20, "pool": 8, "batch_size": 4},
        "rewards": {"embedder": {"plugin": f"{REWARDS}:Embedder"}},
    },
}
# What is one option away from the plain run, on which model, and how much longer it takes than an epoch's measuring.
OPTIONS: dict[str, tuple[str, list[str], float]] = {
    "fp32": ("sd35", ["optimise.precision=fp32"], 2.0),
    "fp32-with-tf32": ("sd35", ["optimise.precision=fp32", "engine.tf32=true"], 1.0),
    "fp16": ("sd35", ["optimise.precision=fp16"], 0.0),
    "merged-in-bf16": ("sd35", ["engine.merge=all"], 0.0),
    "nothing-merged": ("sd35", ["engine.merge=off"], 0.0),
    "checkpointing": ("sd35", ["optimise.gradient_checkpointing=true"], 0.5),
    "compiled-blocks": ("sd35", ["engine.compile=true"], 3.0),
    "attention-auto": ("flux", ["engine.attention=auto"], 0.0),
    "cache-taylorseer": ("flux", ["rollout.cache.kind=taylorseer"], 1.0),
    "cache-first-block": ("flux", ["rollout.cache.kind=first_block"], 1.0),
    "cache-mag": ("flux", ["rollout.cache.kind=mag"], 1.0),
    "micro-batches-by-memory": ("sd35", ["optimise.micro_batch=auto"], 0.5),
}
# What both the option and the plain runs beside it differ in from the other options: caches need steps to skip.
TOGETHER = {name: ["rollout.steps=12"] for name in OPTIONS if name.startswith("cache-")}
CUDA_ONLY = ("fp16", "fp32-with-tf32")


class Workshop:
    """Where configs, models and run folders of a proof lie, and what they run on."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        self.folder, self.tiny = folder, tiny
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._fits: dict[str, Fit] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def model(self, name: str) -> Path:
        if not self.tiny:
            return ROOT / "assets" / "architectures" / MODELS[name].architecture
        folder = self.folder / f"tiny-{name}"
        if not (folder / "model_index.json").is_file():
            MODELS[name].tiny(folder)
        return folder

    def config(self, model: str, method: Mapping[str, Any], overrides: Sequence[str] = (), name: str = "run") -> Config:
        """An epoch of two groups in one optimiser step, in bf16 on a GPU."""
        group, rows = (MODELS[model].group, MODELS[model].rows) if not self.tiny else (4, 4)
        for side in ("train", "test"):
            (self.folder / f"{side}.txt").write_text("".join(f"{side} prompt {i}\n" for i in range(2)))
        optimise: dict[str, Any] = {"batch_size": 2 * group, "micro_batch": rows, "learning_rate": 1e-4}
        optimise |= {"precision": "bf16" if self.device.type == "cuda" else "fp32"}
        rollout = {"groups": 2, "group_size": group, "steps": STEPS, "batch_size": group}
        rollout |= {"resolution": 16 if self.tiny else 512}
        sections: dict[str, Any] = dict(method)
        sections["rollout"] = rollout | sections.get("rollout", {})
        sections |= {"model": str(self.model(model)), "family": f"{FAMILIES}:{MODELS[model].family}"}
        sections |= {"prompts": {side: str(self.folder / f"{side}.txt") for side in ("train", "test")}}
        sections |= {"optimise": optimise, "run_dir": str(self.folder / name), "epochs": 2}
        sections |= {"lora": {"rank": 4, "alpha": 8}} if self.tiny else {}
        sections |= {"evaluate": {"features": "pixels", "prompts": 1, "per_prompt": 2}, "tracking": {"samples": 0}}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(sections))
        return self.fitting(load_config(path, list(overrides)))

    def fitting(self, config: Config) -> Config:
        """The config with what `diffrl doctor` advises, if it would not fit into the device's memory.

        Raises UserError where nothing helps.
        """
        if self.device.type != "cuda":
            return config
        found = advise(config, torch.cuda.mem_get_info()[0], fit=self.fit(config))
        if found is None:
            raise UserError("doctor: it does not fit into this device's memory, whatever is saved")
        return load_config(Path(config.run_dir).with_suffix(".yaml"), found[1]) if found[1] else config

    def fit(self, config: Config) -> Fit:
        """What doctor counts; once a call, since a network of true size takes a processor some time."""
        values = {name: value for name, value in config.resolved().items() if name != "run_dir"}
        key = yaml.safe_dump(values)
        if key not in self._fits:
            self._fits[key] = estimate(config)
        return self._fits[key]


def clean() -> None:
    """Give back what the last run held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def built(config: Config) -> Run:
    """The run, as `train` prepares it."""
    folder = Path(config.run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    torch.set_float32_matmul_precision("highest")  # what an earlier run's engine.tf32 has set
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


def measure(shop: Workshop, config: Config, bare: bool = True, epochs: int = 3) -> dict[str, Any]:
    """Speed, peak memory against what doctor counts, and the share of the bare loop."""
    clean()
    fit = shop.fit(config)
    run = built(config)
    try:
        run.loop.run_epoch(0)  # the first forwards choose kernels and compile, and old is still the trained LoRA
        if shop.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        lines = [run.loop.run_epoch(1 + i) for i in range(epochs)]
        found: dict[str, Any] = {
            name: statistics.median(speeds(config, line)[name] for line in lines) for name in speeds(config, lines[0])
        }
        found["spread"] = {  # of the epochs: the largest over the smallest
            name: round(max(values) / min(values), 3)
            for name in found
            for values in [[speeds(config, line)[name] for line in lines]]
        }
        counted = (sum(fit.parts.values()) + max(fit.peaks.values())) / GIB
        found |= {"loss": lines[-1]["loss"], "counted_gib": round(counted, 3), "rows": fit.rows}
        if shop.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / GIB
            found |= {"peak_gib": round(peak, 3), "peak_to_counted": round(peak / counted, 3)}
        if bare:
            with Recorder(run.policy) as recorder:
                line = run.loop.run_epoch(1 + epochs)
            found["share_of_bare_loop"] = round(recorder.replay() / (line["seconds"] - line["seconds/reward"]), 3)
    finally:
        chosen = {"attention_ms": {k: round(1000 * v, 1) for k, v in run.policy.attention_times.items()}}
        run.close()
        del run
        clean()
    saved = {"gradient_checkpointing": config.optimise.gradient_checkpointing, "batch_size": config.rollout.batch_size}
    return found | saved | (chosen if chosen["attention_ms"] else {})


def train_method(shop: Workshop, model: str, method: str) -> dict[str, Any]:
    """One method on one model."""
    return measure(shop, shop.config(model, METHODS[method]))


def try_option(shop: Workshop, option: str) -> dict[str, Any]:
    """What an option gives, the plain run measured before and after it."""
    model, overrides, _ = OPTIONS[option]
    if option in CUDA_ONLY and shop.device.type != "cuda":
        raise UserError("needs CUDA")

    def one(changes: Sequence[str]) -> dict[str, Any]:
        config = shop.config(model, METHODS["nft"], [*TOGETHER.get(option, []), *changes])
        return measure(shop, config, bare=False)

    before, found, after = one([]), one(overrides), one([])
    names = ("images_per_second_rollout", "rows_per_second_optimise")
    relative = {name: round(2 * found[name] / (before[name] + after[name]), 3) for name in names}
    spread = {name: round(after[name] / before[name], 3) for name in names}
    result: dict[str, Any] = {"model": model, "overrides": overrides, **found, "relative": relative}
    if "peak_gib" in found:
        result["relative"]["peak_memory"] = round(found["peak_gib"] / before["peak_gib"], 3)
    return result | {"plain_after_to_before": spread}
