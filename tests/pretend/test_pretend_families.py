"""Every family on the pretend device: an epoch of sampling and training, and how often a forward waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretend_cuda
import pytest
import torch
from pretend_runs import WARMTH
from tiny import tiny_flux, tiny_sd, tiny_sd3
from tiny_models.recent import TINY, make

from diffrl.additions.quantised import Quantised
from diffrl.config import load_config
from diffrl.run.train import Run

OLDER: dict[str, Callable[[Path], Path]] = {
    "sd3": tiny_sd3,
    "flux-dev": tiny_flux,
    "sd": tiny_sd,
    "sdxl": lambda folder: tiny_sd(folder, xl=True),
}
NAMES = [*OLDER, *(name for name in TINY if not name.endswith(("-turbo", "-distilled")))]
# Waits of a forward of two texts, all of them in diffusers' own code; the other families have none.
WAITS = {"qwen-image": 1, "lumina2": 1, "qwen-image-2.1": 26, "hidream": 31}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_family_samples_trains_and_decodes(config_file: Any, tmp_path: Path, name: str, precision: str) -> None:
    model = OLDER[name](tmp_path / "model") if name in OLDER else make(name, tmp_path / "model")
    side = TINY[name].resolution if name in TINY else 16
    path = config_file(
        "family",
        model=str(model),
        rollout={"groups": 2, "group_size": 2, "steps": 2, "batch_size": 4, "resolution": side},
        optimise={"batch_size": 4, "micro_batch": None, "precision": precision},
        rewards={"warmth": WARMTH},
    )
    run = Run(load_config(path, ["rewards.redness=null"]))
    before = run.policy.state()
    lines = [run.loop.run_epoch(epoch) for epoch in range(2)]
    assert torch.tensor([line["loss"] for line in lines]).isfinite().all()
    assert any(not torch.equal(before[key], value) for key, value in run.policy.state().items())
    x = torch.randn(2, *run.policy.latent_shape, device="cuda")
    t, cond = torch.full((2,), 0.5, device="cuda"), run.policy.encode(["red a", "red and e"])
    with torch.no_grad():
        run.policy.predict(x, t, cond)  # what is made once is made here
        with pretend_cuda.waits() as seen:
            run.policy.predict(x, t, cond)
    assert sum(seen.values()) == WAITS.get(name, 0), dict(seen)
    run.close()


@pytest.mark.parametrize("base", ["int8", "fp8"])  # nf4's kernels are bitsandbytes' own, for true devices
def test_a_base_in_fewer_bits(config_file: Any, tmp_path: Path, base: str) -> None:
    path = config_file(
        "base",
        model=str(tiny_flux(tmp_path / "model")),
        rollout={"groups": 2, "group_size": 2, "steps": 2, "batch_size": 4, "resolution": 16},
        optimise={"batch_size": 4, "micro_batch": None, "precision": "bf16"},
        engine={"base": base},
        rewards={"warmth": WARMTH},
    )
    run = Run(load_config(path, ["rewards.redness=null"]))
    assert {parameter.device.type for parameter in run.policy.network.parameters()} == {"cuda"}
    layers = [layer for layer in run.policy.network.modules() if isinstance(layer, Quantised)]
    assert layers and all(layer.codes.element_size() == 1 for layer in layers)
    before = run.policy.state()
    loss = run.loop.run_epoch(0)["loss"]
    assert loss == loss and any(not torch.equal(before[key], value) for key, value in run.policy.state().items())
    run.close()
