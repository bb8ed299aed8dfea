"""What is under test, and what several checks ask of it: losses, gradients, log-probability ratios.

Symbols as in `diffrl.policy.base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import diffusers
import torch
from torch import Tensor

from diffrl.forward import FlowMatching
from diffrl.policy import LoraSpec, Policy, find_model, load_policy
from diffrl.policy.pipelines import Resolution, load_pipeline
from diffrl.rollout import collect
from diffrl.samplers import SamplerSpec, gaussian_log_prob, sde_kernel
from diffrl.seeds import noise

PROMPTS = ("a red dog", "two cats, a hat and a long table with nine chairs", "a hat")
STEPS = (1, 4, 10, 28)
SPEC = LoraSpec(rank=4, alpha=8)
GUIDANCE = 3.0


class Failed(Exception):
    """A check's finding: what was expected and what was there."""


@dataclass
class Subject:
    """The model under test, and the plain pipeline that it is compared with."""

    model: str
    resolution: Resolution = None
    steps: Sequence[int] = STEPS
    family: str | None = None  # path/to/file.py:Class

    def policy(self, precision: str = "fp32", base: str = "full") -> Policy:
        words = {"precision": precision, "resolution": self.resolution, "family": self.family, "base": base}
        return load_policy(self.model, lora=SPEC, **words)  # type: ignore[arg-type]

    @cached_property
    def fp32(self) -> Policy:
        """With a LoRA that shows: B starts at zero."""
        policy = self.policy()
        scramble(policy)
        return policy

    @cached_property
    def plain(self) -> Any:
        """The plain pipeline; who changes it changes it back."""
        source, index = find_model(self.model)
        pipe = load_pipeline(getattr(diffusers, str(index["_class_name"])), source, index, torch.float32)
        pipe.set_progress_bar_config(disable=True)
        self.fp32.backbone.prepare_plain(pipe)
        return pipe

    def noise(self, rows: int) -> Tensor:
        return noise(self.fp32.latent_shape, [(0, "check", i) for i in range(rows)])


def scramble(policy: Policy, std: float = 0.3) -> None:
    """A LoRA that changes the pictures."""
    generator = torch.Generator().manual_seed(1)
    state = {key: std * torch.randn(value.shape, generator=generator) for key, value in policy.state().items()}
    policy.load_state("default", state)


def loss(policy: Policy, subject: Subject) -> Tensor:
    x, t = subject.noise(2), torch.tensor([0.9, 0.4])
    return policy.predict(x, t, policy.encode(PROMPTS[:2])).v.square().mean()


def gradients(policy: Policy, subject: Subject) -> dict[str, Tensor | None]:
    loss(policy, subject).backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in policy.trainable}
    clear(policy)
    return gradients


def clear(policy: Policy) -> None:
    for _, parameter in policy.trainable:
        parameter.grad = None


def ratios(policy: Policy) -> tuple[float, int]:
    """How far training's log-probability ratio is from 1 on the very rows that were drawn, and of how many steps."""
    from diffrl.prompts import Prompt

    name = "flow_sde" if isinstance(policy.process, FlowMatching) else "ddim"
    strength = 1.0 if name == "ddim" else 0.7
    spec = SamplerSpec(sampler=name, steps=3, guidance_scale=GUIDANCE, noise_level=strength)
    prompts = [Prompt(text) for text in PROMPTS]
    rollout = collect(
        policy, prompts, spec, seed=0, epoch=0, group_size=2, batch_size=6, keep_trajectory=True, keep_images=False
    )
    assert rollout.trajectory is not None
    trajectory, cond, worst = rollout.trajectory, rollout.cond.select(rollout.prompt_index), 0.0
    for j in range(trajectory.t.shape[1]):
        t, t_next = trajectory.t[:, j], trajectory.t_next[:, j]
        prediction = policy.predict(trajectory.x[:, j], t, cond, GUIDANCE)
        x = trajectory.x[:, j]
        step = sde_kernel(name, x, prediction, t, t_next, strength, rollout.t_second, policy.process)
        ratio = (gaussian_log_prob(trajectory.x_next[:, j], *step) - trajectory.log_prob[:, j]).exp()
        worst = max(worst, float((ratio.detach() - 1).abs().max()))
    return worst, trajectory.t.shape[1]
