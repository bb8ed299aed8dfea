"""Every trainer on every policy: tiny random pipelines of the true classes, one optimiser step, one golden value each.

A covering set (every method on two policies, every policy with two methods) runs in `make test`, all pairs in
`make test-long`. The golden value is the norm of that step's gradient: it tells when a refactoring changed a method.
Who changes one on purpose records new values, and says why:
`GOLDEN=record pytest -m "long or not long" tests/integration/test_matrix.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from tiny import KNOWN_WEIGHTS, scramble, tiny_flux, tiny_sd, tiny_sd3

from diffrl.config import Config, load_config
from diffrl.methods.fdfo import FDFOSection
from diffrl.run.train import Run, train

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "golden.json"
POLICIES: dict[str, Callable[[Path], Path]] = {
    "sd3": tiny_sd3,
    "sd3-t5": lambda folder: tiny_sd3(folder, t5=True, max_sequence_length=8),
    "flux-dev": tiny_flux,
    "flux-schnell": lambda folder: tiny_flux(folder, dev=False),
    "sd": tiny_sd,
    "sd-v": lambda folder: tiny_sd(folder, prediction_type="v_prediction"),
    "sdxl": lambda folder: tiny_sd(folder, xl=True),
}
WARMTH, BRIGHTNESS = (f"{DATA}/warmth.py:{name}" for name in ("Warmth", "Brightness"))
METHODS: dict[str, dict[str, Any]] = {
    "nft": {"objective": "nft", "nft": {"beta": 0.1}},
    "grpo": {"objective": "grpo", "grpo": {"beta": 0.1, "advantage_std": "group"}},
    "crd": {"objective": "crd", "crd": {"advantage_std": "group"}},
    "awm": {"objective": "awm", "awm": {"advantage_std": "group"}},
    "dgpo": {"objective": "dgpo", "dgpo": {"beta": 0.1}},
    "fdfo": {"objective": "fdfo", "rollout": {"same_noise": True, "noise_level": 0.05}},
    "direct": {"objective": "direct"},
    "srpo": {
        "objective": "direct",
        "direct": {"align": {}, "pair": {}},
        "rewards": {"embedder": {"plugin": f"{DATA}/embedder.py:Embedder"}},
    },
    "gardo": {
        "objective": "grpo",
        "watch": {"brightness": {"plugin": BRIGHTNESS}},
        "gardo": {"auxiliary": ["brightness"], "share": 0.2, "beta": 1.0},
    },
    "marble": {
        "objective": "nft",
        "rewards": {"warmth": {"plugin": WARMTH}, "brightness": {"plugin": BRIGHTNESS}},
        "marble": {"mode": "fresh"},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(policy: str) -> Path:
        if policy not in made:
            made[policy] = POLICIES[policy](tmp_path_factory.mktemp("models") / policy)
        return made[policy]

    return folder


PAIRS = [
    pytest.param(
        policy,
        method,
        marks=[] if policy in ("sd3", "flux-dev") or method in ("nft", "grpo") else [pytest.mark.long],
    )
    for policy in POLICIES
    for method in METHODS
]


@pytest.mark.parametrize(("policy", "method"), PAIRS)
def test_one_step(
    config_file, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, policy: str, method: str
) -> None:
    if method == "fdfo":
        monkeypatch.setattr(FDFOSection, "beta", 0.1)  # the golden value has a penalty, as gardo adds it
    sections = {"rewards": {"warmth": {"plugin": WARMTH}}, **METHODS[method]}
    sampler = "dpm2"
    if sections["objective"] in ("grpo", "fdfo"):
        sampler = "ddim" if policy.startswith("sd") and not policy.startswith("sd3") else "flow_sde"
    rollout = {"groups": 2, "group_size": 4, "steps": 3, "sampler": sampler, "resolution": 16}
    rollout |= sections.pop("rollout", {})
    optimise = {"batch_size": 8, "micro_batch": 0.5, "max_grad_norm": 1e6}
    path = config_file("run", model=str(models(policy)), rollout=rollout, optimise=optimise, **sections)
    found = one_step(load_config(path, ["rewards.redness=null"]))
    compare(GOLDEN, f"{policy} {method}", found, rel=2e-3)


def one_step(config: Config) -> float:
    """The norm of the gradient of a run's first epoch, in which every LoRA matrix moves and stays finite."""
    run = Run(config)
    scramble(run.policy, std=0.1)  # B starts at zero: nothing would reach A in the first step
    for name in run.snapshots:
        run.policy.copy("default", name)
    before = run.policy.state()
    metrics = run.loop.run_epoch(0)
    after = run.policy.state()
    assert [k for k in before if torch.equal(before[k], after[k])] == [], "a LoRA matrix did not move"
    assert all(bool(v.isfinite().all()) for v in after.values())
    assert torch.tensor(metrics["loss"]).isfinite()
    return metrics["grad_norm"]


def compare(golden: Path, key: str, found: float, rel: float) -> None:
    """With the value recorded in the file `golden`; GOLDEN=record records it."""
    if not KNOWN_WEIGHTS:
        pytest.skip("another version of transformers makes other random weights")
    known = json.loads(golden.read_text()) if golden.is_file() else {}
    if os.environ.get("GOLDEN") == "record":
        known[key] = float(f"{found:.6g}")
        golden.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    assert found == pytest.approx(known[key], rel=rel)


@pytest.mark.parametrize("method", ["nft", "crd"])
def test_distilled_guidance_is_trained_as_it_is_sampled(
    config_file, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """FLUX.1-dev is told its guidance in every forward; classifier-free guidance is for sampling only."""
    for policy, trained in (("flux-dev", {3.5}), ("sd3", {1.0})):
        path = config_file(
            "run", model=str(models(policy)), objective=method, rollout={"guidance_scale": 3.5, "resolution": 16}
        )
        run = Run(load_config(path, [f"{method}.beta=0"]))
        seen: set[float] = set()
        forward = run.policy.backbone.forward

        def watching(network, x_t, t, cond, guidance, forward=forward, seen=seen):
            if torch.is_grad_enabled():
                seen.add(guidance)
            return forward(network, x_t, t, cond, guidance)

        monkeypatch.setattr(run.policy.backbone, "forward", watching)
        run.loop.run_epoch(0)
        assert seen == trained


@pytest.mark.parametrize("policy", some(["flux-dev", "sd", "sdxl"], "sd"))
def test_a_whole_run_with_evaluation(config_file, models: Callable[[str], Path], charts: None, policy: str) -> None:
    path = config_file("run", model=str(models(policy)), rollout={"resolution": 16}, epochs=1)
    train(load_config(path))
    folder = Path(load_config(path).run_dir)
    assert (folder / "lora" / "pytorch_lora_weights.safetensors").is_file() and (folder / "report.html").is_file()
