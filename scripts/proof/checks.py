"""What else has to be proved on a GPU: the machine, the suite's own tests, an exact resume, FSDP2, a pretraining."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import torch
from bare import wait
from training import METHODS, ROOT, Workshop, clean

from diffrl import __version__
from diffrl.config import Config, load_config
from diffrl.records import checkpoint
from diffrl.run.train import train

PACKAGES = ("diffusers", "transformers", "peft", "accelerate")
OPTIONAL = ("xformers", "flash-attn", "sageattention", "bitsandbytes", "pytest", "triton")
GIB = 2**30


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


def environment(shop: Workshop, seconds: float) -> dict[str, Any]:
    """Machine, versions, and what the device can do at all: products of matrices and copies of memory a second."""
    cuda = shop.device.type == "cuda"
    side = 8192 if cuda else 512
    found: dict[str, Any] = {"machine": machine(), "versions": versions(), "load": round(os.getloadavg()[0], 2)}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        if cuda or dtype == torch.float32:
            a = torch.randn(side, side, device=shop.device).to(dtype)
            taken = _seconds(lambda a=a: a @ a, shop.device)  # type: ignore[misc]
            found[f"product_{name}_tflops"] = round(2 * side**3 / taken / 1e12, 3)
    a = torch.empty(side, side, device=shop.device)
    taken = _seconds(lambda: a.clone(), shop.device)
    found["copy_gib_per_second"] = round(2 * a.nbytes / taken / GIB, 1)
    return found


def _seconds(work: Any, device: torch.device, repeats: int = 10) -> float:
    for _ in range(3):
        work()
    wait(device)
    mark = time.perf_counter()
    for _ in range(repeats):
        work()
    wait(device)
    return (time.perf_counter() - mark) / repeats


def suite(shop: Workshop, seconds: float) -> dict[str, Any]:
    """The test suite's `gpu` marks, in a process of their own."""
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text(encoding="utf-8")]
    report = shop.folder / "gpu-tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    if not report.exists():
        raise RuntimeError(f"pytest wrote no report: {(done.stderr or done.stdout).strip()[-300:]}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    outcome = {case.get("name", "?"): next((child for child in case if child.tag in KINDS), None) for case in cases}
    count = {"passed": sum(1 for x in outcome.values() if x is None)}
    count |= {word: sum(1 for x in outcome.values() if x is not None and x.tag == kind) for kind, word in KINDS.items()}
    reasons = {name: str(x.get("message"))[:200] for name, x in outcome.items() if x is not None}
    if count["failed"] or count["broken"]:
        raise RuntimeError(f"{count}: {reasons}")
    return {**count, "not_passed": reasons}


REPEATABLE = ["evaluate.every=1000", "engine.deterministic=true"]
KINDS = {"failure": "failed", "error": "broken", "skipped": "skipped"}


def resume(shop: Workshop, seconds: float) -> dict[str, Any]:
    """Two epochs at once, twice, and two with a stop between: the same LoRA, moments and averages to the bit?

    With deterministic kernels (`engine.deterministic`): others add in any order in their backward passes, and would
    prove nothing. Whether the device then repeats itself is what the second undisturbed run shows.
    """
    states = {name: _trained(shop, name, stops) for name, stops in (("one", []), ("two", []), ("resumed", [1]))}
    repeats, away = _apart(states["one"], states["two"]), _apart(states["one"], states["resumed"])
    found: dict[str, Any] = {
        "repeats_itself": repeats == 0.0,
        "resumed_equal": away == 0.0,
        "numbers": _numbers(states["one"]),
    }
    found |= {"largest_difference": {"undisturbed": repeats, "resumed": away}}
    if repeats == 0.0 and away != 0.0:
        raise RuntimeError(f"the device repeats itself, but a resumed run ends elsewhere: {found}")
    return found


def _trained(shop: Workshop, name: str, stops: list[int]) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint of `diffrl train`, left and resumed after the epochs `stops`."""
    config = shop.config("sd35", METHODS["nft"], REPEATABLE, name=name)
    folder = Path(config.run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    with (shop.folder / f"{name}.log").open("w") as log, redirect_stdout(log):
        for number, epochs in enumerate([*stops, config.epochs]):
            clean()
            train(_until(config, epochs), resume=folder if number else None)
    path = checkpoint.latest(folder)
    assert path is not None, "train() saves after the last epoch"
    tensors, _ = checkpoint.load(path)
    return {
        f"{part}/{key}": value for part, values in tensors.items() if part != "rng" for key, value in values.items()
    }


def _until(config: Config, epochs: int) -> Config:
    return load_config(Path(config.run_dir).with_suffix(".yaml"), [f"epochs={epochs}", *REPEATABLE])


def _apart(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys(), "two runs of one config save the same tensors"
    return max(float((one[key].double() - two[key].double()).abs().max()) for key in one if one[key].numel())


def _numbers(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in state.values())


def sharded(shop: Workshop, seconds: float) -> dict[str, Any]:
    """FSDP2 with one process: an epoch over a sharded network, in a process of its own, against a plain one."""
    config = shop.config("sd35", METHODS["nft"], name="sharded")
    script, out = Path(__file__).with_name("one_shard.py"), shop.folder / "sharded.json"
    out.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    alone |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    if shop.device.type == "cpu":
        alone |= {"ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, str(script), str(Path(config.run_dir).with_suffix(".yaml")), str(out)]
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=seconds)
    if done.returncode or not out.exists():
        raise RuntimeError(f"{script.name}: {(done.stderr or done.stdout).strip()[-500:]}")
    return dict(json.loads(out.read_text()))


def playground(shop: Workshop, seconds: float) -> dict[str, Any]:
    """The playground's generator trained further for whatever time is left, in a process of its own.

    Weights and state lie beside the JSON: the shipped ones are not touched, and the next call goes on.
    """
    work, out = shop.folder / "playground", shop.folder / "playground-models"
    if not out.exists():
        shutil.copytree(ROOT / "assets" / "playground", out)
    state = work / "generator.pt"
    before = _told(state)
    minutes = (0.05 if shop.tiny else max(seconds - 60, 30) / 60) + before["seconds"] / 60
    command = [sys.executable, str(ROOT / "scripts" / "train_playground.py"), "--from-shipped", "--work", str(work)]
    command += ["--out", str(out), "--scenes", "64" if shop.tiny else "20000", "--minutes", f"generator={minutes:.3f}"]
    command += ["--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"train_playground.py: {(done.stderr or done.stdout).strip()[-500:]}")
    after = _told(state)
    images, taken = after["images"] - before["images"], after["seconds"] - before["seconds"]
    return {"images": after["images"], "trained_seconds": round(after["seconds"], 1), "images_now": images} | {
        "images_per_second": round(images / taken, 1) if taken else None,
        "models": str(out),
    }


def _told(state: Path) -> dict[str, float]:
    if not state.exists():
        return {"images": 0, "seconds": 0.0}
    found = torch.load(state, weights_only=True, map_location="cpu")
    return {name: found[name] for name in ("images", "seconds")}
