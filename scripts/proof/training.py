"""Epochs of the real loop on networks of true size: how fast, how much memory, how far from the bare loop.

The model is a published architecture with random weights (`scripts/benchmarks/random_weights.py`); config and `Run` are
the package's own. Tiny: the conformance suite's little pipelines in the place of the published ones.
"""

from __future__ import annotations

import gc
import math
import shutil
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import yaml
from bare import Recorder
from estimates import Estimates
from tiny_models.classic import tiny_flux, tiny_sd3
from tiny_models.recent import make

from diffrl.config import Config, load_config
from diffrl.config.engine import Engine
from diffrl.errors import UserError
from diffrl.methods.d2align.stage1 import prepare_direction
from diffrl.run.fit import GIB, Fit
from diffrl.run.train import Run

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ROOT / "scripts" / "benchmarks" / "random_weights.py"
REWARDS = ROOT / "scripts" / "proof" / "proof_rewards.py"
STEPS, TRAINED = 4, 2  # sampling steps, and how many noise levels of an image are trained
EPOCHS = 3  # that are timed, after one that is not
SPEEDS = ("images_per_second_rollout", "rows_per_second_optimise")


class Model(NamedTuple):
    """A published architecture, its family, its little stand-in, and the size of an epoch."""

    architecture: str
    family: str
    tiny: Callable[[Path], Path]
    group: int  # images per prompt; an epoch has two prompts, and one optimiser step
    rows: int  # of a micro-batch
    seconds: float  # that a part on it takes about, on an H100
    resolution: int = 512


FLUX = ("FLUX.1-dev", "Flux", tiny_flux)
QWEN = ("Qwen-Image", "QwenImage", lambda folder: make("qwen-image", folder))
MODELS = {
    "sd35": Model("stable-diffusion-3.5-medium", "SD3", tiny_sd3, 16, 16, 30.0),
    "flux": Model(*FLUX, 8, 4, 100.0),
    "qwen": Model(*QWEN, 8, 4, 180.0),
    "flux-1024": Model(*FLUX, 4, 4, 160.0, 1024),  # where it is trained
    "qwen-1024": Model(*QWEN, 2, 2, 180.0, 1024),
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
        "rewards": {"embedder": {"plugin": f"{ROOT / 'tests' / 'data' / 'embedder.py'}:Embedder"}},
    },
}


class Case(NamedTuple):
    """What a part measures: a method on a model, and what else its config says."""

    model: str
    method: str = "nft"
    overrides: tuple[str, ...] = ()
    longer: float = 1.0  # than a plain part on the model

    @property
    def seconds(self) -> float:
        return MODELS[self.model].seconds * self.longer


def _words(kind: Any) -> list[str]:
    """The texts that an annotation names."""
    return [word for one in get_args(kind) for word in ([one] if isinstance(one, str) else _words(one))]


def quantised() -> list[str]:
    """The values of `engine.base` but its default; none while there is no such key."""
    field = Engine.model_fields.get("base")
    return [word for word in _words(field.annotation) if word != field.default] if field else []


def _cases() -> dict[str, Case]:
    """By the part's name, in the order of what is worth most."""
    found = {f"train/sd35/{method}": Case("sd35", method) for method in ("nft", "crd", "grpo")}
    found["train/sd35/marble-5"] = Case("sd35", "marble-5", longer=2.0)
    found |= {f"train/{model}/nft": Case(model) for model in ("flux", "qwen", "flux-1024")}
    found["option/compiled-blocks"] = Case("sd35", overrides=("engine.compile=true",), longer=4.0)
    found |= {f"option/base-{word}": Case("flux", overrides=(f"engine.base={word}",)) for word in quantised()}
    found["train/qwen-1024/nft"] = Case("qwen-1024")
    found |= {f"train/sd35/{method}": Case("sd35", method) for method in ("gardo", "d2align")}
    found["train/sd35/marble-50"] = Case("sd35", "marble-50", longer=4.0)
    found["train/flux/grpo"], found["train/qwen/d2align"] = Case("flux", "grpo"), Case("qwen", "d2align")
    for name, longer, *overrides in (
        ("fp16", 1.0, "optimise.precision=fp16"),
        ("fp32", 3.0, "optimise.precision=fp32"),
        ("fp32-with-tf32", 2.0, "optimise.precision=fp32", "engine.tf32=true"),
        ("merged-in-bf16", 1.0, "engine.merge=all"),
        ("nothing-merged", 1.0, "engine.merge=off"),
        ("checkpointing", 1.5, "optimise.gradient_checkpointing=true"),
        ("micro-batches-by-memory", 2.0, "optimise.micro_batch=auto"),
    ):
        found[f"option/{name}"] = Case("sd35", overrides=tuple(overrides), longer=longer)
    return found


CASES = _cases()
CUDA_ONLY = ("option/fp16", "option/fp32-with-tf32")


class Workshop:
    """Where configs, models and run folders of a proof lie, what they run on, and what doctor counts for them."""

    def __init__(self, folder: Path, tiny: bool, estimates: Estimates) -> None:
        self.folder, self.tiny, self.estimates = folder, tiny, estimates
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.plain: dict[str, dict[str, Any]] = {}  # what NFT without options gave, by model
        folder.mkdir(parents=True, exist_ok=True)

    def model(self, name: str) -> Path:
        if not self.tiny:
            return ROOT / "assets" / "architectures" / MODELS[name].architecture
        folder = self.folder / f"tiny-{MODELS[name].architecture}"
        if not (folder / "model_index.json").is_file():
            MODELS[name].tiny(folder)
            (folder / "diffrl.json").write_text(
                '{"max_sequence_length": 16}'
            )  # Qwen-Image's 1,024 take a core a minute
        return folder

    def written(self, name: str, run: str) -> Config:
        """The part's config in RUN.yaml: an epoch of two groups in one optimiser step, in bf16 on a GPU."""
        case = CASES[name]
        model, method = MODELS[case.model], METHODS[case.method]
        group, rows = (model.group, model.rows) if not self.tiny else (4, 4)
        for side in ("train", "test"):
            (self.folder / f"{side}.txt").write_text("".join(f"{side} prompt {i}\n" for i in range(2)))
        optimise: dict[str, Any] = {"batch_size": 2 * group, "micro_batch": rows, "learning_rate": 1e-4}
        optimise |= {"precision": "fp32" if self.tiny and self.device.type == "cpu" else "bf16"}
        rollout = {"groups": 2, "group_size": group, "steps": STEPS, "batch_size": group}
        rollout |= {"resolution": model.resolution // 32 if self.tiny else model.resolution}
        sections: dict[str, Any] = dict(method)
        sections["rollout"] = rollout | sections.get("rollout", {})
        sections |= {"model": str(self.model(case.model)), "family": f"{FAMILIES}:{model.family}"}
        sections |= {"prompts": {side: str(self.folder / f"{side}.txt") for side in ("train", "test")}}
        sections |= {"optimise": optimise, "run_dir": str(self.folder / run), "epochs": 2}
        sections |= {"lora": {"rank": 4, "alpha": 8}} if self.tiny else {}
        sections |= {"evaluate": {"features": "pixels", "prompts": 1, "per_prompt": 2}, "tracking": {"samples": 0}}
        path = self.folder / f"{run}.yaml"
        path.write_text(yaml.safe_dump(sections))
        config = load_config(path, list(case.overrides))
        path.write_text(yaml.safe_dump(config.resolved()))
        return config

    def config(self, name: str, run: str = "run") -> tuple[Config, Fit]:
        """The part's config with what `diffrl doctor` advises, if it would not fit into the device's memory."""
        config = self.written(name, run)
        free = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else math.inf
        overrides, fit = self.estimates.fitting(name, config, free)
        path = self.folder / f"{run}.yaml"
        config = load_config(path, overrides)
        path.write_text(yaml.safe_dump(config.resolved()))
        return config, fit


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


def measure(shop: Workshop, name: str, bare: bool = True) -> dict[str, Any]:
    """Speed and its spread over the epochs, peak memory against what doctor counts, and the share of the bare loop."""
    clean()
    config, fit = shop.config(name)
    run = built(config)
    cuda = shop.device.type == "cuda"
    try:
        run.loop.run_epoch(0)  # the first forwards choose kernels and compile, and old is still the trained LoRA
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        lines = [run.loop.run_epoch(1 + i) for i in range(EPOCHS)]
        timed = [speeds(config, line) for line in lines]
        found: dict[str, Any] = {key: statistics.median(one[key] for one in timed) for key in SPEEDS}
        apart = {key: max(one[key] for one in timed) / min(one[key] for one in timed) for key in SPEEDS}
        counted = (sum(fit.parts.values()) + max(fit.peaks.values())) / GIB
        found |= {"spread": round(max(apart.values()), 3), "loss": lines[-1]["loss"]}
        found |= {"counted_gib": round(counted, 3), "rows": fit.rows}
        if cuda:
            peak = torch.cuda.max_memory_allocated() / GIB
            found |= {"peak_gib": round(peak, 3), "peak_to_counted": round(peak / counted, 3)}
        if bare:
            with Recorder(run.policy) as recorder:
                line = run.loop.run_epoch(1 + EPOCHS)
            found["share_of_bare_loop"] = round(recorder.replay() / (line["seconds"] - line["seconds/reward"]), 3)
    finally:
        run.close()
        del run
        clean()
    saved = {"gradient_checkpointing": config.optimise.gradient_checkpointing, "batch_size": config.rollout.batch_size}
    return found | saved


def train_method(shop: Workshop, name: str) -> dict[str, Any]:
    """One method on one model."""
    found = measure(shop, name)
    if CASES[name].method == "nft":
        shop.plain[CASES[name].model] = found
    return found


def try_option(shop: Workshop, name: str) -> dict[str, Any]:
    """What an option gives beside the plain run, which is measured first unless it was before."""
    if name in CUDA_ONLY and shop.device.type != "cuda":
        raise UserError("needs CUDA")
    model = CASES[name].model
    if model not in shop.plain:
        train_method(shop, f"train/{model}/nft")
    found, plain = measure(shop, name, bare=False), shop.plain[model]
    figures = [*SPEEDS, *({"peak_gib"} & found.keys())]
    relative = {key: round(found[key] / plain[key], 3) for key in figures}
    return {"model": model, "overrides": list(CASES[name].overrides), **found, "relative": relative}
