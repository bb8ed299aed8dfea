"""From a config to the parts of a run: objective, scorers, samplers, numbers of the loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch

from diffrl.config import Config
from diffrl.config.reward import read_by_steps
from diffrl.divgen.diversity import default_features
from diffrl.guard import Guard
from diffrl.policy import Policy
from diffrl.policy.engine import compile_blocks, set_attention
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.compose import Composition
from diffrl.rewards.direction import Corrected
from diffrl.rewards.protocol import Reward
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


def build_objective(
    config: Config, spec: SamplerSpec, rewards: Mapping[str, Reward] | None = None, lower: Collection[str] = ()
) -> Objective:
    """The objective that the config names, with what is wrapped around it.

    `rewards` are for those that need them; `lower`: names of rewards of which a lower score is better.
    """
    objective = _objective(config, spec, rewards or {})
    if config.marble is not None:
        set_columns(objective.rule, config.marble.mode, config.marble.measure)
    if config.gardo is None:
        return objective
    arguments = config.gardo.model_dump()
    reset = arguments.pop("reset")
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
    asked = {
        name: Entry(entry.plugin or name, entry.arguments, entry.cache, entry.offload)
        for name, entry in entries.items()
    }
    built = build_rewards(asked, device)
    optimised, watched = ({name: built[name] for name in table} for table in (config.rewards, config.watch))
    if config.d2align is not None:  # without its direction, which `diffrl.trainers.d2align` learns
        name = config.d2align.corrected(config)
        optimised[name] = Corrected(optimised[name], config.d2align.omega, name=name)
    read = {name: watched[name] for name in [*auxiliary_names(config), *_read_by_steps(config)]}
    # Beside sampling a reward is scored only where other silicon does the sampling, or the scoring.
    elsewhere = [name for name, reward in {**optimised, **read}.items() if getattr(reward, "remote", False)]
    scorer = Scorer({**optimised, **read}, overlap=device.type == "cuda" or elsewhere, **limits)
    return scorer, Scorer({**optimised, **watched}, **limits)


def auxiliary_names(config: Config) -> list[str]:
    """Watched rewards that a method reads on training images, too, without optimising them."""
    return list(config.gardo.auxiliary) if config.gardo is not None else []


def _read_by_steps(config: Config) -> list[str]:
    """Watched rewards, beside auxiliary ones, that the steps of optimised ones read on training images."""
    auxiliary = auxiliary_names(config)
    return [name for name in read_by_steps(config.rewards, config.watch) if name not in auxiliary]


def build_composition(config: Config) -> Composition:
    """From the columns of the training scorer to those of the optimised and the auxiliary rewards."""
    kept = [*config.rewards, *auxiliary_names(config)]
    steps = {name: entry.shape.steps() for name, entry in {**config.watch, **config.rewards}.items()}
    return Composition([*kept, *_read_by_steps(config)], steps, len(kept))


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
        max_skipped=optimise.max_skipped,
        offload_vae=config.engine.offload_vae,
    )


def prepare_engine(config: Config, policy: Policy) -> None:
    """What the section `engine` says of the network and the autoencoder. Raises UserError for what cannot run here."""
    network: Any = policy.backbone.network
    if config.engine.attention != "native":
        set_attention(network, config.engine.attention)
    if config.engine.tile_vae:
        policy.vae.enable_tiling()
    if config.engine.compile:
        compile_blocks(network)


def build_optimiser(config: Config, policy: Policy) -> torch.optim.Optimizer:
    """AdamW on the trained LoRA."""
    parameters = [parameter for _, parameter in policy.trainable]
    optimise = config.optimise
    arguments: dict[str, Any] = {"betas": optimise.betas, "weight_decay": optimise.weight_decay}
    if config.engine.optimiser == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return cast(torch.optim.Optimizer, AdamW8bit(parameters, optimise.learning_rate, **arguments))
    return torch.optim.AdamW(parameters, optimise.learning_rate, **arguments)


def build_guard(config: Config, lower: Collection[str]) -> Guard:
    """The guard rails over all rewards of the config; `lower`: those of which a lower score is better."""
    return Guard(
        trained=list(config.rewards),
        watched=[name for name in config.watch if name not in config.rewards],
        lower=lower,
        evaluations=config.guard.evaluations,
        diversity=config.guard.diversity,
        saturation=config.guard.saturation,
    )


def features_name(config: Config) -> str:
    """The feature space of the diversity measure."""
    name = config.evaluate.features
    return default_features(config.model) if name == "auto" else name


def describe(run: Any) -> str:
    """One paragraph that says what is about to happen."""
    config, policy = run.config, run.policy
    parameters = sum(p.numel() for _, p in policy.trainable)
    images = config.rollout.groups * config.rollout.group_size
    rewards = ", ".join(f"{n} x {config.rewards[n].weight:g}" for n in config.rewards)
    sharded = ", which share the network (FSDP2)" if policy.sharded else ""
    return (
        f"{config.objective} on {config.model}: {config.epochs} epochs of {images} images "
        f"({config.rollout.groups} prompts x {config.rollout.group_size}), {run.spec.steps} steps of {run.spec.name}; "
        f"{images // config.optimise.batch_size * config.optimise.inner_epochs} optimiser steps an epoch; LoRA rank "
        f"{config.lora.rank}, {parameters:,} parameters; rewards: {rewards}; "
        f"{run.accelerator.num_processes} process(es) on {policy.device}{sharded}; run folder {run.folder}"
    )
