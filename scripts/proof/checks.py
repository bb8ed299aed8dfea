"""What else has to be proved on a GPU: the machine, the suite's own tests, an exact resume, a profile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import Tell, built, clean
from references import wait
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler
from training import ROOT
from workshop import Workshop

from diffrl import __version__
from diffrl.config import load_config
from diffrl.records import checkpoint
from diffrl.run.train import train

PACKAGES = ("diffusers", "transformers", "peft", "accelerate")
OPTIONAL = ("bitsandbytes", "torchao", "pytest", "triton")
GIB = 2**30
PROFILED = 25  # rows of a profile
# Of a resume: the order of a sum does not depend on how many images there are.
SHORT = ["rollout.group_size=4", "rollout.batch_size=4", "rollout.steps=2", "optimise.batch_size=8"]
SHORT += ["optimise.micro_batch=4"]


def versions() -> dict[str, str]:
    """Of what the figures depend on, and of the optional packages that are here."""
    found = {"diffrl": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in PACKAGES:
                raise
    return found


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "cpu": platform.machine()}
    found["memory_gib"] = round(psutil.virtual_memory().total / GIB, 1)
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found |= {"gpu": facts.name, "gpu_memory_gib": round(facts.total_memory / GIB, 1), "cuda": torch.version.cuda}
        found["capability"] = f"{facts.major}.{facts.minor}"
    return found


def environment(shop: Workshop, limit: float, tell: Tell) -> dict[str, Any]:
    """Machine, versions, and what the device can do at all: products of matrices and copies of memory a second."""
    found: dict[str, Any] = {"machine": machine(), "versions": versions(), "load": round(os.getloadavg()[0], 2)}
    for name in ("bf16", "fp16", "fp32") if shop.device.type == "cuda" else ("fp32",):
        rates = shop.rates(name)
        found[f"product_{name}_tflops"] = round(rates["operations"] / 1e12, 3)
    return found | {"copy_gib_per_second": round(rates["bytes"] / GIB, 1)}


def suite(shop: Workshop, limit: float, tell: Tell) -> dict[str, Any]:
    """The test suite's `gpu` marks, in a process of their own: pytest's verdict."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    files = ["tests/gpu", "tests/unit/test_rewards_building.py"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=limit)
    output = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise RuntimeError(output[-500:])
    return {"pytest": verdict(output)}


def verdict(output: str) -> str:
    """The line of pytest's output that counts the tests, which need not be its last."""
    lines = [line.strip("= ") for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return lines[-1] if lines else output.splitlines()[-1]


def resume(shop: Workshop, limit: float, tell: Tell) -> dict[str, Any]:
    """Do two epochs with a stop between end as two without, to the bit, under `engine.deterministic`?

    Other kernels add in any order in their backward passes and would prove nothing. Where the runs differ, another
    undisturbed one tells whether the device repeats itself at all.
    """
    mark = time.monotonic()
    one = _trained(shop, "one")
    tell({"undisturbed_seconds": round(time.monotonic() - mark, 1)})
    away = _apart(one, _trained(shop, "resumed", 1))
    if away:
        itself = _apart(one, _trained(shop, "two"))
        raise RuntimeError(f"a resumed run differs by {away:g}, another undisturbed one by {itself:g}")
    return {"resumed_equal": True, "numbers": sum(tensor.numel() for tensor in one.values())}


def _trained(shop: Workshop, name: str, *stops: int) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint of `diffrl train`, left and resumed after the epochs `stops`."""
    config, _ = shop.config("train/sd35/nft", name)
    folder = Path(config.run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    words = ["evaluate.every=1000", "engine.deterministic=true", *SHORT]
    with (shop.folder / f"{name}.log").open("w") as log, redirect_stdout(log):
        for number, epochs in enumerate([*stops, config.epochs]):
            clean()
            asked = load_config(folder.with_suffix(".yaml"), [f"epochs={epochs}", *words])
            train(asked, resume=folder if number else None)
    path = checkpoint.latest(folder)
    assert path is not None, "train() saves after the last epoch"
    parts = checkpoint.load(path)[0].items()
    return {f"{part}/{key}": value for part, own in parts if part != "rng" for key, value in own.items()}


def _apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys(), "two runs of one config save the same tensors"
    return max(float((one[key].double() - two[key].double()).abs().max()) for key in one if one[key].numel())


def profile(shop: Workshop, limit: float, tell: Tell, model: str) -> dict[str, Any]:
    """The kernels that take most of an epoch of NFT, and the share of its time in which the device had one.

    Without a device's kernels (on a CPU) it is torch's operators.
    """
    clean()
    config, _ = shop.config(f"train/{model}/nft")
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if shop.device.type == "cuda" else [])]
    run = built(config)
    try:
        run.loop.run_epoch(0)
        with profiler(activities=kinds) as seen:
            mark = time.perf_counter()
            run.loop.run_epoch(1)
            wait(shop.device)
            taken = 1e6 * (time.perf_counter() - mark)  # microseconds, as the profiler's
    finally:
        run.close()
        del run
        clean()
    events = list(seen.key_averages())
    rows = [(e.self_device_time_total, e.count, e.key) for e in events if e.device_type != DeviceType.CPU]
    found: dict[str, Any] = {"epoch_seconds": round(taken / 1e6, 3), "of": "kernels" if rows else "operators"}
    if rows:
        found["busy"] = round(sum(row[0] for row in rows) / taken, 3)
    rows = sorted(rows or [(e.self_cpu_time_total, e.count, e.key) for e in events], reverse=True)[:PROFILED]
    table = [{"name": n[:100], "calls": c, "ms": round(t / 1e3, 2), "share": round(t / taken, 4)} for t, c, n in rows]
    return found | {"table": table}
