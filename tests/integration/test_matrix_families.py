"""Every trainer on every family of 2025 and 2026: one optimiser step on a tiny pipeline, one golden value each.

A covering set (every family once) runs in `make test`, all pairs in `make test-all`. The norm of that step's gradient
is compared with a golden value. Who changes one on purpose records new values, and says why:
`GOLDEN=record pytest -m "slow or not slow" tests/integration/test_matrix_families.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_matrix import METHODS as ALL
from test_matrix import WARMTH, compare, one_step
from tiny_models.recent import TINY, make

from diffrl.config import load_config

GOLDEN = Path(__file__).parents[1] / "data" / "golden_families.json"
NAMES = [name for name in TINY if not name.endswith(("-turbo", "-distilled"))]
COVERING = {
    "qwen-image": "grpo",
    "z-image": "nft",
    "flux2-klein": "gardo",
    "flux2-dev": "nft",
    "krea2": "nft",
    "qwen-image-2.1": "crd",
    "sana": "grpo",
    "chroma": "nft",
    "lumina2": "direct",
    "hidream": "crd",
}
# AWM and DGPO ask nothing of a family that NFT and CRD do not, nor FDFO what GRPO, nor SRPO what direct does not.
METHODS = {name: sections for name, sections in ALL.items() if name not in ("awm", "dgpo", "fdfo", "srpo")}
PAIRS = [
    pytest.param(name, method, marks=[] if COVERING[name] == method else [pytest.mark.slow])
    for name in NAMES
    for method in METHODS
]


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp("families") / name)
        return made[name]

    return folder


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_one_step(config_file, tiny_family: Callable[[str], Path], name: str, method: str) -> None:
    sections = {"rewards": {"warmth": {"plugin": WARMTH}}, **METHODS[method]}
    sampler = "flow_sde" if sections["objective"] == "grpo" else "dpm2"
    rollout = {"groups": 2, "group_size": 2, "steps": 2, "sampler": sampler, "resolution": TINY[name].resolution}
    if sampler == "flow_sde":
        rollout["guidance_scale"] = 3.0
    optimise = {"batch_size": 4, "micro_batch": 0.5, "max_grad_norm": 1e6}
    model = str(tiny_family(name))
    path = config_file("run", model=model, rollout=rollout, optimise=optimise, **sections)
    compare(GOLDEN, f"{name} {method}", one_step(load_config(path, ["rewards.redness=null"])), rel=2e-2)


def test_every_pair_has_a_golden_value() -> None:
    assert sorted(json.loads(GOLDEN.read_text())) == sorted(f"{name} {method}" for name in NAMES for method in METHODS)
