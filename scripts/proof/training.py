"""Methods and options on networks of true size, as configs: what the parts `train/...` and `option/...` measure.

The model is a published architecture with random weights (`shared_weights.py`); config and `Run` are the package's own.
Tiny: the conformance suite's little pipelines in the place of the published ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tiny_models.classic import tiny_flux, tiny_sd3
from tiny_models.recent import make

from diffrl.plugins import installed

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ROOT / "scripts" / "proof" / "shared_weights.py"
REWARDS = ROOT / "scripts" / "proof" / "proof_rewards.py"
STEPS, TRAINED = 4, 2  # sampling steps, and how many noise levels of an image are trained


class Model(NamedTuple):
    """A published architecture, its family, its little stand-in, and the size of an epoch."""

    architecture: str
    family: str
    tiny: Callable[[Path], Path]
    group: int  # images per prompt; an epoch has two prompts, and one optimiser step
    rows: int  # of a micro-batch
    seconds: float  # that a part on it takes about, on an H100, if nothing is known
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
        "direct": {"decode_chunk": 4},
        "d2align": {"steps": 20, "pool": 8},
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


def quantised() -> list[str]:
    """The values of `engine.base` but its default."""
    return list(installed("engine.base"))


def _cases() -> dict[str, Case]:
    """By the part's name; those of one network come together."""
    found = {f"train/sd35/{method}": Case("sd35", method) for method in ("nft", "crd", "grpo", "gardo", "d2align")}
    found |= {"train/sd35/marble-5": Case("sd35", "marble-5", longer=2.0)}
    found |= {"train/sd35/marble-50": Case("sd35", "marble-50", longer=4.0)}
    found["option/compiled-blocks"] = Case("sd35", overrides=("engine.compile=true",), longer=4.0)
    for name, longer, *overrides in (
        ("checkpointing", 1.5, "optimise.gradient_checkpointing=true"),
        ("micro-batches-by-memory", 2.0, "optimise.micro_batch=auto"),
        ("fp16", 1.0, "optimise.precision=fp16"),
        ("fp32", 3.0, "optimise.precision=fp32"),
        ("fp32-with-tf32", 2.0, "optimise.precision=fp32", "engine.tf32=true"),
    ):
        found[f"option/{name}"] = Case("sd35", overrides=tuple(overrides), longer=longer)
    found |= {"train/flux/nft": Case("flux"), "train/flux/grpo": Case("flux", "grpo")}
    found |= {f"option/base-{word}": Case("flux", overrides=(f"engine.base={word}",)) for word in quantised()}
    found["train/flux-1024/nft"] = Case("flux-1024")
    found |= {"train/qwen/nft": Case("qwen"), "train/qwen/d2align": Case("qwen", "d2align")}
    found["train/qwen-1024/nft"] = Case("qwen-1024")
    return found


def sections(name: str, tiny: bool) -> dict[str, Any]:
    """Of a part's config: an epoch of two groups in one optimiser step."""
    case = CASES[name]
    model, method = MODELS[case.model], METHODS[case.method]
    group, rows = (model.group, model.rows) if not tiny else (4, 4)
    rollout = {"groups": 2, "group_size": group, "steps": STEPS, "batch_size": group, "resolution": model.resolution}
    optimise = {"batch_size": 2 * group, "micro_batch": rows, "learning_rate": 1e-4, "precision": "bf16"}
    return method | {"rollout": rollout | method.get("rollout", {}), "optimise": optimise}


CASES = _cases()
CUDA_ONLY = ("option/fp16", "option/fp32-with-tf32")
