"""Methods and small runs for the tests on the pretend device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffrl.config import Config, load_config

DATA = Path(__file__).resolve().parents[1] / "data"
WARMTH, BRIGHTNESS = ({"plugin": f"{DATA}/warmth.py:{name}"} for name in ("Warmth", "Brightness"))
EMBEDDER = {"plugin": f"{DATA}/embedder.py:Embedder"}
SDE = {"sampler": "flow_sde", "window": 2}
METHODS: dict[str, dict[str, Any]] = {
    "nft": {"objective": "nft", "nft": {"beta": 0.1}},
    "grpo": {"objective": "grpo", "rollout": SDE, "grpo": {"beta": 0.1}},
    "crd": {"objective": "crd", "crd": {"timesteps": 2}},
    "gardo": {
        "objective": "grpo",
        "rollout": SDE,
        "watch": {"brightness": BRIGHTNESS},
        "gardo": {"auxiliary": ["brightness"], "share": 0.2, "beta": 1.0},
    },
    "marble": {
        "objective": "nft",
        "rewards": {"warmth": WARMTH, "brightness": BRIGHTNESS},
        "marble": {"mode": "fresh"},
    },
    "direct": {
        "objective": "direct",
        "rewards": {"warmth": WARMTH},
        "direct": {"decode_chunk": 2},
    },
    "d2align": {
        "objective": "direct",
        "rewards": {"redness": EMBEDDER},
        "d2align": {"steps": 4, "pool": 4},
    },
    "srpo": {
        "objective": "direct",
        "rewards": {"redness": EMBEDDER},
        "direct": {"align": {}, "pair": {}, "decode_chunk": 2},
    },
    "dpo": {"objective": "dpo", "dpo": {"follow": 2}},
    "gdro": {"objective": "gdro"},
    "awm": {"objective": "awm"},
    "dgpo": {"objective": "dgpo", "dgpo": {"beta": 0.1}},
    "fdfo": {
        "objective": "fdfo",
        "rollout": {"sampler": "cps", "steps": 4, "noise_level": 0.05, "same_noise": True},
    },
    "scouted": {"objective": "nft", "rollout": {"scout": {"images": 4, "steps": 2}}},
    "rwr": {"objective": "rwr"},
    "acflow": {"objective": "acflow"},
    "sft": {"objective": "rwr", "rwr": {"weights": "best"}},
    "prdp": {"objective": "prdp", "rollout": {"sampler": "flow_sde"}},
    "tree": {
        "objective": "grpo",
        "rollout": {"sampler": "flow_sde", "steps": 4, "same_noise": True},
        "tree": {"splits": [0, 1], "branch": 2},
    },
}


def config_of(write: Callable[..., Path], method: str, *overrides: str, **sections: Any) -> Config:
    """A small run of the method; `sections` replace keys of its sections."""
    merged: dict[str, Any] = dict(METHODS[method])
    for name, values in sections.items():
        before = merged.get(name)
        both = isinstance(before, Mapping) and isinstance(values, Mapping)
        merged[name] = {**before, **values} if both else values
    path = write(method, **merged)
    plain = [] if "redness" in merged.get("rewards", {"redness": 1}) else ["rewards.redness=null"]
    return load_config(path, [*plain, *overrides])
