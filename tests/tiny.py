"""Tiny random pipelines of the true classes, and what policy tests need again and again."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tiny_models.classic import WIDTH, clip_tokenizer, tiny_flux, tiny_sd, tiny_sd3
from torch import Tensor

from diffrl.objectives.running_stats import summaries
from diffrl.policy import Conditioning, LoraSpec, Policy

__all__ = ["WIDTH", "clip_tokenizer", "tiny_flux", "tiny_sd", "tiny_sd3"]
SPEC = LoraSpec(rank=4, alpha=8)
PROMPTS = ["a red dog", "two cats and a hat"]
# Another version of transformers makes other random weights than those whose values are recorded.
_PINNED = (Path(__file__).parents[1] / "constraints.txt").read_text().split()
KNOWN_WEIGHTS = f"transformers=={version('transformers')}" in _PINNED


def scramble(policy: Policy, name: str = "default", seed: int = 1, std: float = 0.3) -> None:
    """A LoRA that changes the pictures: B starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    state = {k: std * torch.randn(v.shape, generator=generator) for k, v in policy.state(name).items()}
    policy.load_state(name, state)


def inputs(policy: Policy, rows: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Conditioning]:
    """Fixed noise, noise levels from 0.9 to 0.2, and the conditioning of `PROMPTS` in turn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *policy.latent_shape, generator=generator)
    cond = policy.encode(PROMPTS).select(torch.arange(rows) % 2)
    return x, torch.linspace(0.9, 0.2, rows), cond


def velocity(policy: Policy, guidance: float = 1.0) -> Tensor:
    """The active LoRA's prediction for `inputs`."""
    with torch.no_grad():
        return policy.predict(*inputs(policy), guidance).v


def count_forwards(run: Any, monkeypatch: Any) -> Counter:
    """Images that go through the network, by adapter and by whether a gradient is kept."""
    seen: Counter = Counter()
    forward = run.policy.backbone.forward

    def counting(network, x_t, t, cond, guidance):
        active = run.policy.lora._active
        seen[(active[0] if active else "pretrained", torch.is_grad_enabled())] += len(x_t)
        return forward(network, x_t, t, cond, guidance)

    monkeypatch.setattr(run.policy.backbone, "forward", counting)
    return seen


def averages(means: Any) -> dict[str, Any]:
    """What an objective's RunningMeans have taken in, as plain numbers; they are empty then."""
    return summaries(means.take())
