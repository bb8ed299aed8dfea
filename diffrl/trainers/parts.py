"""From a config to the parts of a run: objective, scorers, samplers, numbers of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diffrl.config import Config
from diffrl.report.data import lower_is_better
from diffrl.rewards.direction import Corrected
from diffrl.rewards.protocol import Reward
from diffrl.rewards.registry import load_reward, takes
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec
from diffrl.trainers.algorithm import Decay, Gradients, Objective, SumOfLosses
from diffrl.trainers.crd import CRD
from diffrl.trainers.direct import Direct
from diffrl.trainers.gardo import Gardo
from diffrl.trainers.grpo import GRPO
from diffrl.trainers.loop import LoopSettings
from diffrl.trainers.marble import TOTALS, Marble, set_columns
from diffrl.trainers.nft import NFT


def build_objective(config: Config, spec: SamplerSpec, rewards: Mapping[str, Reward] | None = None) -> Objective:
    """The objective that the config names, with what is wrapped around it; `rewards` are for those that need them."""
    objective = _objective(config, spec, rewards or {})
    if config.marble is not None:
        set_columns(objective.rule, config.marble.mode, config.marble.measure)
    if config.gardo is None:
        return objective
    arguments = config.gardo.model_dump()
    reset = arguments.pop("reset")
    lower = lower_is_better(config.resolved())
    return Gardo(objective, lower=lower, reset_kl=reset["kl"], reset_steps=reset["steps"], **arguments)


def _objective(config: Config, spec: SamplerSpec, rewards: Mapping[str, Reward]) -> Objective:
    """The section's keys are the constructor's arguments."""
    arguments = getattr(config, config.objective).model_dump()
    if config.objective == "grpo":
        return GRPO(spec, **arguments)
    if config.objective == "direct":
        optimised = {name: reward for name, reward in rewards.items() if name in config.rewards}
        return Direct(optimised, [config.rewards[name].weight for name in optimised], **arguments)
    arguments["old"] = Decay(**arguments["old"])
    del arguments["timestep_fraction"]
    arguments["levels"] = config.objective_section.levels(config.rollout)  # type: ignore[attr-defined]
    if config.objective == "crd":
        return CRD(**arguments | {"sampling": Decay(**arguments["sampling"])})
    return NFT(**arguments)


def build_gradients(config: Config) -> Gradients:
    """How the losses of a micro-batch become the LoRA's gradient."""
    marble = config.marble
    if marble is None or (marble.mode in TOTALS and not marble.measure):  # there is one column of advantages
        return SumOfLosses()
    steps = config.rollout.images // config.optimise.batch_size * config.optimise.inner_epochs
    return Marble(list(config.rewards), steps_per_epoch=steps, **marble.model_dump())


def build_scorers(config: Config, device: torch.device) -> tuple[Scorer, Scorer]:
    """What scores training images: rewards, then auxiliary ones; and what judges held-out ones: all that is watched."""
    entries = {**config.rewards, **config.watch}
    limits: dict[str, Any] = {
        "retries": {name: entry.retries for name, entry in entries.items()},
        "timeout": {name: entry.timeout for name, entry in entries.items()},
    }
    optimised, watched = _rewards(config.rewards, device), _rewards(config.watch, device)
    if config.d2align is not None:  # without its direction, which `diffrl.trainers.d2align` learns
        name = config.d2align.corrected(config)
        optimised[name] = Corrected(optimised[name], config.d2align.omega, name=name)
    read = {name: watched[name] for name in auxiliary_names(config)}
    scorer = Scorer({**optimised, **read}, overlap=device.type == "cuda", **limits)
    return scorer, Scorer({**optimised, **watched}, **limits)


def auxiliary_names(config: Config) -> list[str]:
    """Watched rewards that a method reads on training images, too, without optimising them."""
    return list(config.gardo.auxiliary) if config.gardo is not None else []


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
