"""What a command draws: a model, perhaps with a LoRA, its prompts, and how; for `sample`, `evaluate` and `divgen`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffrl.errors import UserError
from diffrl.forward import FlowMatching
from diffrl.policy import Policy, load_policy, read_lora
from diffrl.policy.engine import join_processes
from diffrl.policy.pipelines import Resolution
from diffrl.prompts import Prompt, PromptLike, given_prompts, load_prompts
from diffrl.rollout import SamplerSpec
from diffrl.worlds import worlds

log = logging.getLogger("diffrl")


@dataclass(frozen=True)
class Drawing:
    """What `diffrl sample` and `diffrl evaluate` draw: the model, with a LoRA if one is given, and how.

    Unless said: 10 steps, without noise, of the solver that the plain pipeline uses (Euler for flow models, else DDIM);
    the model's own resolution.
    """

    model: str
    prompts: str | Sequence[PromptLike] = ""
    lora: str | None = None
    seed: int = 0
    per_prompt: int = 1
    steps: int | None = None
    limit: int | None = None
    sampler: str | None = None
    guidance_scale: float = 1.0
    shift: float | None = None  # of the schedule, as rollout.shift
    resolution: Resolution = None
    batch_size: int = 32
    family: str | None = None  # path/to/file.py:Class; None: by the pipeline's class
    merge: str | None = None  # a LoRA that becomes part of the model first; see `diffrl.worlds.find_merge`

    def policy(self) -> Policy:
        """The model on this process's device; bf16 on an accelerator."""
        device = join_processes().device
        spec = read_lora(self.lora)[1] if self.lora is not None else None
        precision = "fp32" if device.type == "cpu" else "bf16"
        kind: dict[str, Any] = {"resolution": self.resolution, "family": self.family, "merge": self.merge}
        try:
            policy = load_policy(self.model, lora=spec, precision=precision, device=device, **kind)
        except UserError as error:
            if str(error).startswith("rollout.resolution: "):
                raise UserError(str(error).removeprefix("rollout.")) from error
            if spec is None or not str(error).startswith("lora.targets: "):
                raise
            text = f'"{self.lora}" is not a LoRA of {self.model}: layers that it changes are not there'
            raise UserError(f"{text} ({str(error).removeprefix('lora.targets: ')})") from error
        if self.lora is not None:
            policy.load_lora(self.lora)
        if device.type == "cuda" and policy.texts.bytes > torch.cuda.mem_get_info(device)[0]:
            policy.texts.room = policy.apart  # the encoders have no room beside the network
        return policy

    def spec(self, policy: Policy) -> SamplerSpec:
        name = self.sampler or ("euler" if isinstance(policy.process, FlowMatching) else "ddim")
        steps = self.steps or 10
        spec = SamplerSpec(sampler=name, steps=steps, guidance_scale=self.guidance_scale, shift=self.shift)
        return spec.model_copy(update={"noise_level": 0.0}) if name == "ddim" else spec

    def amount(self) -> dict[str, Any]:
        return {"seed": self.seed, "per_prompt": self.per_prompt, "batch_size": self.batch_size}

    def chosen(self) -> Sequence[Prompt]:
        known = load_prompts(self.prompts) if isinstance(self.prompts, str) else given_prompts(self.prompts)
        chosen = known[: self.limit]
        if self.model in worlds() and (line := worlds()[self.model].foreign([prompt.text for prompt in chosen])):
            log.warning("%s", line)
        return chosen
