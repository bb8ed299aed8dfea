"""Where configs, models and run folders of a proof lie, and how a part is measured there."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import recipes
import torch
import training
import yaml
from estimates import Estimates
from measuring import SPEEDS, Tell, measure
from recipes import RECIPES
from references import wait
from training import CASES, CUDA_ONLY, FAMILIES, MODELS, ROOT

from diffrl.config import Config, load_config
from diffrl.errors import UserError
from diffrl.memory.fit import Fit

EPOCHS = 3  # of a part train/... or option/... that are timed, after one that is not


class Workshop:
    """The folder, the device, and what doctor counts for the parts."""

    def __init__(self, folder: Path, tiny: bool, estimates: Estimates) -> None:
        self.folder, self.tiny, self.estimates = folder, tiny, estimates
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.plain: dict[str, dict[str, Any]] = {}  # by part: what options are compared with
        self._rates: dict[torch.dtype, dict[str, float]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def model(self, name: str, tokens: int | None = None) -> Path:
        """The folder of configs; `tokens`: of a text, at most."""
        shape = MODELS[name].architecture
        source = ROOT / "assets" / "architectures" / shape
        if self.tiny:
            source = self.folder / f"tiny-{shape}"
            if not (source / "model_index.json").is_file():
                MODELS[name].tiny(source)
            tokens = 16  # Qwen-Image's 1,024 take a core a minute
        if tokens is None:
            return source
        folder = self.folder / f"{tokens}" / shape
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (folder / "diffrl.json").write_text(json.dumps({"max_sequence_length": tokens}))
        return folder

    def written(self, name: str, run: str) -> Config:
        """The part's config in RUN.yaml, in bf16 on a GPU."""
        case = RECIPES[name] if name in RECIPES else CASES[name]
        made = (recipes if name in RECIPES else training).sections(name, self.tiny)
        for side in ("train", "test"):
            (self.folder / f"{side}.txt").write_text("".join(f"{side} prompt {i}\n" for i in range(2)))
        made["prompts"] = {side: str(self.folder / f"{side}.txt") for side in ("train", "test")}
        made["model"] = str(self.model(case.model, getattr(case, "tokens", None)))
        made["family"] = f"{FAMILIES}:{MODELS[case.model].family}"
        if self.tiny:
            made["rollout"] |= {"resolution": MODELS[case.model].resolution // 32}
            made["lora"] = {"rank": 4, "alpha": 8}
            made["optimise"] |= {"precision": "fp32" if self.device.type == "cpu" else "bf16"}
        made |= {"run_dir": str(self.folder / run), "epochs": 2, "tracking": {"samples": 0}}
        made["evaluate"] = {"features": "pixels", "prompts": 1, "per_prompt": 2}
        path = self.folder / f"{run}.yaml"
        path.write_text(yaml.safe_dump(made))
        config = load_config(path, list(case.overrides))
        path.write_text(yaml.safe_dump(config.resolved()))
        return config

    def config(self, name: str, run: str = "run") -> tuple[Config, Fit | None]:
        """The part's config with what `diffrl doctor` advises, if it would not fit into the device's memory."""
        config = self.written(name, run)
        free = float(torch.cuda.mem_get_info()[1]) if self.device.type == "cuda" else math.inf
        overrides, fit = self.estimates.fitting(name, config, free)
        path = self.folder / f"{run}.yaml"
        config = load_config(path, overrides)
        path.write_text(yaml.safe_dump(config.resolved()))
        return config, fit

    def rates(self, precision: str) -> dict[str, float]:
        """The most that the device can do: "operations" and "bytes" a second."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
        if dtype not in self._rates:
            side = 512 if self.tiny else 8192
            a = torch.randn(side, side, device=self.device).to(dtype)
            operations = 2 * side**3 / seconds(lambda: a @ a, self.device)
            b = torch.empty(side, side, device=self.device)
            bytes_of = 2 * b.nbytes / seconds(lambda: b.clone(), self.device)
            self._rates[dtype] = {"operations": operations, "bytes": bytes_of}
        return self._rates[dtype]


def seconds(work: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Of one call, a mean after three."""
    for _ in range(3):
        work()
    wait(device)
    mark = time.perf_counter()
    for _ in range(repeats):
        work()
    wait(device)
    return (time.perf_counter() - mark) / repeats


def train_method(shop: Workshop, name: str, tell: Tell) -> dict[str, Any]:
    """One method on one model, or a recipe."""
    config, fit = shop.config(name)
    rates = shop.rates(config.optimise.precision)
    recipe = name in RECIPES
    found = measure(config, fit, tell, epochs=1 if recipe else EPOCHS, whole=not recipe, rates=rates)
    shop.plain[name] = found
    return found


def plain_of(name: str) -> str | None:
    """The part that this one is compared with."""
    if name in RECIPES:
        return RECIPES[name].beside
    return f"train/{CASES[name].model}/nft" if name.startswith("option/") else None


def try_option(shop: Workshop, name: str, tell: Tell) -> dict[str, Any]:
    """What an option gives beside the plain run, which is measured first unless it was before."""
    if name in CUDA_ONLY and shop.device.type != "cuda":
        raise UserError("needs CUDA")
    beside = plain_of(name)
    assert beside is not None, "an option"
    if beside not in shop.plain:
        train_method(shop, beside, lambda more: None)
    plain = shop.plain[beside]
    config, fit = shop.config(name)
    compiled, recipe = config.engine.compile, name in RECIPES
    overrides = {"beside": beside, "overrides": list((RECIPES if recipe else CASES)[name].overrides)}  # type: ignore[index]

    def compared(found: dict[str, Any]) -> dict[str, Any]:
        figures = [key for key in (*SPEEDS, "images_per_gpu_second", "peak_gib") if key in found.keys() & plain.keys()]
        found = found | {"relative": {key: round(found[key] / plain[key], 3) for key in figures}}
        for phase in ("rollout", "optimise") if recipe and "tflop_rollout" in plain else ():
            rate = 1e12 * plain[f"tflop_{phase}"] / found["epoch"][phase]
            found[f"mfu_{phase}"] = round(rate / shop.rates(config.optimise.precision)["operations"], 4)
        return overrides | found

    rates = shop.rates(config.optimise.precision) if compiled else None
    epochs = 1 if recipe else EPOCHS
    found = measure(
        config, fit, lambda more: tell(compared(more)), epochs=epochs, whole=compiled or not recipe, rates=rates
    )
    return compared(found)
