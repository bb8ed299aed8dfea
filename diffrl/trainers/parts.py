"""From a config to the parts of a run: objective, scorers, samplers, numbers of the loop."""

from __future__ import annotations

from typing import Any

import torch

from diffrl.config import Config
from diffrl.rewards.registry import load_reward, takes
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec
from diffrl.trainers.algorithm import Decay, Gradients, Objective, SumOfLosses
from diffrl.trainers.grpo import GRPO
from diffrl.trainers.loop import LoopSettings
from diffrl.trainers.nft import NFT


def build_objective(config: Config, spec: SamplerSpec) -> Objective:
    """The objective that the config names; its section's keys are the constructor's arguments."""
    arguments = getattr(config, config.objective).model_dump()
    if config.objective == "grpo":
        return GRPO(spec, **arguments)
    arguments["old"] = Decay(**arguments["old"])
    return NFT(**arguments)


def build_gradients(config: Config) -> Gradients:
    """How the losses of a micro-batch become the LoRA's gradient."""
    return SumOfLosses()


def build_scorers(config: Config, device: torch.device) -> tuple[Scorer, Scorer]:
    """What scores training images: rewards, then auxiliary ones; and what judges held-out ones: all that is watched."""
    entries = {**config.rewards, **config.watch}
    limits: dict[str, Any] = {
        "retries": {name: entry.retries for name, entry in entries.items()},
        "timeout": {name: entry.timeout for name, entry in entries.items()},
    }
    optimised, watched = _rewards(config.rewards, device), _rewards(config.watch, device)
    read = {name: watched[name] for name in auxiliary_names(config)}
    scorer = Scorer({**optimised, **read}, overlap=device.type == "cuda", **limits)
    return scorer, Scorer({**optimised, **watched}, **limits)


def auxiliary_names(config: Config) -> list[str]:
    """Watched rewards that a method reads on training images, too, without optimising them."""
    return []


def _rewards(table: Any, device: torch.device) -> dict[str, Any]:
    """The rewards of a config section; those that run on a device get the run's unless the config names one."""
    rewards = {}
    for name, entry in table.items():
        plugin, arguments = entry.plugin or name, entry.arguments
        if "device" not in arguments and takes(plugin, "device"):
            arguments["device"] = str(device)
        rewards[name] = load_reward(plugin, **arguments)
    return rewards


def sampler_spec(config: Config) -> SamplerSpec:
    rollout = config.rollout
    return SamplerSpec(
        name=rollout.sampler,
        steps=rollout.steps,
        guidance=rollout.guidance_scale,
        level=rollout.noise_level,
        eta=rollout.noise_level,
        window=rollout.window,
        window_range=rollout.window_range,
        same_noise=rollout.same_noise,
    )


def evaluation_spec(config: Config) -> SamplerSpec:
    """Evaluation is deterministic: DPM-Solver++ for flow models, DDIM without noise for DDPM-type ones."""
    rollout = config.rollout
    name = "ddim" if rollout.sampler == "ddim" else "dpm2"
    steps = config.evaluate.steps or rollout.steps
    return SamplerSpec(name=name, steps=steps, guidance=rollout.guidance_scale, eta=0.0)


def loop_settings(config: Config) -> LoopSettings:
    optimise = config.optimise
    return LoopSettings(
        seed=config.seed,
        group_size=config.rollout.group_size,
        rollout_batch=config.rollout.batch_size,
        batch_size=optimise.batch_size,
        accumulation=optimise.accumulation,
        inner_epochs=optimise.inner_epochs,
        max_grad_norm=optimise.max_grad_norm,
        ema=optimise.ema,
    )


def features_name(config: Config) -> str:
    """The feature space of the diversity measure: "auto" is the playground's CLIP there, else a grid of colours."""
    name = config.evaluate.features
    if name != "auto":
        return name
    return "clip" if config.model == "playground" else "pixels"
