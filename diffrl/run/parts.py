"""From a config to the parts of a run: objective, scorers, samplers, numbers of the loop."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch

from diffrl.advantages import Checked
from diffrl.config import Config
from diffrl.config.base import Method
from diffrl.config.reward import Watched, auxiliary_names, read_on_training_images, spatial
from diffrl.errors import UserError
from diffrl.features import default_features
from diffrl.objectives.gradients import Gradients, SumOfLosses
from diffrl.objectives.minibatches import AUTO_ROWS
from diffrl.objectives.objective import Credit, Given, Objective
from diffrl.plugins import load, load_value
from diffrl.policy import Policy
from diffrl.policy.engine import compile_blocks, set_attention
from diffrl.policy.host import keep_pages
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.compose import Composition
from diffrl.rewards.protocol import Reward, ability
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec
from diffrl.run.loop import LoopSettings
from diffrl.run.rate import LearningRate
from diffrl.worlds import worlds

log = logging.getLogger("diffrl")


def named(place: str) -> Any:
    """What `module:name` is; its module is imported only now."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def build_objective(
    config: Config, spec: SamplerSpec, rewards: Mapping[str, Reward] | None = None, lower: Collection[str] = ()
) -> Objective:
    """The objective that the config names, with what is wrapped around it.

    `rewards` are for those that need them; `lower`: names of rewards of which a lower score is better.
    """
    optimised = {name: reward for name, reward in (rewards or {}).items() if name in config.rewards}
    given = Given(config, spec, optimised, build_credit(config))
    objective: Objective = _trainer(config.method, config.objective).of(config.objective_section, given)
    if config.optimise.noise == "path":
        objective.noising.path, objective.keep_trajectory = True, "path"
    if names := spatial(config.rewards):
        cast(Any, objective).see_regions([list(config.rewards).index(name) for name in names], names)
    if config.advantages is not None:
        objective.rule.estimate = Checked(config.advantages.estimate(), config.advantages.rule)
    for section in config.sections:
        objective = section.around(objective, config, lower)
    return objective


def build_credit(config: Config) -> Credit | None:
    """Credit over the steps, if the config asks for one."""
    for method in config.methods:
        if method.kind == "credit":
            credit: Credit = _trainer(method).of(getattr(config, method.name), config)
            return credit
    return None


def _trainer(method: Method, objective: str = "") -> Any:
    """The class that a method is built from: the one that it names, or the one that the config's objective leads to."""
    return load_value("objective", method.name, method.trainer) if method.trainer else load("objective", objective)


def build_gradients(config: Config) -> Gradients:
    """How the losses of a micro-batch become the LoRA's gradient."""
    found = (section.combiner(config) for section in config.sections)
    return next((combiner for combiner in found if combiner is not None), SumOfLosses())


def build_scorers(config: Config, device: torch.device) -> tuple[Scorer, Scorer]:
    """What scores training images: rewards, then auxiliary ones; and what judges held-out ones: all that is watched."""
    entries = {**config.rewards, **config.watch}
    asked = {
        name: Entry(entry.plugin or name, entry.arguments, entry.cache, entry.offload, entry.column)
        for name, entry in entries.items()
    }
    built = build_rewards(asked, device)
    first = {f"{name}_first": name for name in config.rewards if ability(built[name], "learns")}
    owners = {name: entries[first.get(name, name)] for name in (*entries, *first)}
    limits: dict[str, Any] = {
        "retries": {name: entry.retries for name, entry in owners.items()},
        "timeout": {name: entry.timeout for name, entry in owners.items()},
        "plugins": {name: entry.plugin or first.get(name, name) for name, entry in owners.items()},
    }
    optimised, watched = ({name: built[name] for name in table} for table in (config.rewards, config.watch))
    if first:
        as_at_first = named("diffrl.methods.learning:First")
        watched |= {name: as_at_first(built[learning]) for name, learning in first.items()}
    for section in config.sections:
        section.correct(optimised)
    read = {name: watched[name] for name in read_on_training_images(config)}
    # Beside sampling a reward is scored only where other silicon does the sampling, or the scoring.
    elsewhere = [name for name, reward in {**optimised, **read}.items() if ability(reward, "remote")]
    for name in spatial(config.rewards):
        if ability(optimised[name], "maps") is None:
            raise UserError(f"rewards.{name}.spatial: it declares no `maps`, (h, w) of its map; leave it out")
    beside: Any = device.type == "cuda" or elsewhere
    scorer = Scorer({**optimised, **read}, overlap=beside, spatial=spatial(config.rewards), **limits)
    judges = {name: reward for name, reward in {**optimised, **watched}.items() if name not in scorer.asking}
    return scorer, Scorer(judges, **limits)


def build_composition(config: Config) -> Composition:
    """From the columns of the training scorer to those of the optimised and the auxiliary rewards."""
    steps = {name: entry.shape.steps() for name, entry in {**config.watch, **config.rewards}.items()}
    columns = [*config.rewards, *read_on_training_images(config)]
    return Composition(columns, steps, len(config.rewards) + len(auxiliary_names(config)))


def evaluation_spec(config: Config) -> SamplerSpec:
    """Evaluation is deterministic: DPM-Solver++ for flow models, DDIM without noise for DDPM-type ones.

    Few-step models (`renoise`) make their images by their own step: an ODE solver is not what they were distilled for.
    """
    rollout = config.rollout
    steps = config.evaluate.steps or rollout.steps
    same: dict[str, Any] = {"guidance_scale": rollout.guidance_scale, "shift": rollout.shift}
    if rollout.sampler == "renoise":
        return SamplerSpec(sampler="renoise", steps=max(steps, 2), noise_level=rollout.noise_level, **same)
    name = "ddim" if rollout.sampler == "ddim" else "dpm2"
    return SamplerSpec(sampler=name, steps=steps, noise_level=0.0, **same)


def loop_settings(config: Config) -> LoopSettings:
    optimise, total = config.optimise, config.epochs * config.optimiser_steps
    return LoopSettings(
        seed=config.seed,
        group_size=config.rollout.group_size,
        batch_size=optimise.batch_size,
        accumulation=optimise.accumulation,
        micro_batch=AUTO_ROWS if optimise.micro_batch == "auto" else optimise.micro_batch,
        inner_epochs=optimise.inner_epochs,
        max_grad_norm=optimise.max_grad_norm,
        ema=optimise.ema,
        ema_every=optimise.ema_every,
        ema_warmup=optimise.ema_warmup,
        rate=LearningRate(optimise.learning_rate, optimise.schedule, optimise.warmup, total),
        max_skipped=optimise.max_skipped,
        offload_vae=config.engine.offload_vae,
    )


def set_deterministic(asked: bool) -> None:
    """Kernels that give the same bits each time, where torch has them; an operation that has none raises."""
    if asked:  # cuBLAS reads it at its first product, which is after this
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(asked)


def prepare_engine(config: Config, policy: Policy) -> None:
    """What the section `engine` says of the network and the autoencoder. Raises UserError for what cannot run here."""
    network: Any = policy.backbone.network
    policy.decoded = config.engine.decode
    if policy.sharded and (asked := _apart(config)):
        raise UserError(f"{asked[0]}: apart moves a whole network, and FSDP2 leaves a share of it; leave it out")
    if config.engine.encoders == "apart":
        policy.texts.room = policy.apart
    if config.engine.attention != "native":
        set_attention(network, config.engine.attention)
    if config.engine.tile_vae:
        policy.vae.enable_tiling()
    if config.engine.compile:
        compile_blocks(network)
    if policy.device.type == "cpu":
        keep_pages()
        # Blocks that are recomputed or compiled run outside of where the mode could see their attention.
        plain = not (config.optimise.gradient_checkpointing or config.engine.compile)
        policy.wide_attention = config.optimise.precision == "bf16" and plain
    elif policy.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.engine.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.engine.tf32  # torch's own default is on, for convolutions alone
    set_deterministic(config.engine.deterministic)
    fused, merge = policy.lora.fused, config.engine.merge
    fused.merging, fused.lossy = merge != "off" and not policy.sharded, merge == "all"
    if policy.sharded and merge == "all":
        log.warning("engine.merge: all is not used: under FSDP2 no process has a whole weight to merge into")


def _apart(config: Config) -> list[str]:
    """The keys for whose sake the network leaves the device for a while."""
    tables: dict[str, Mapping[str, Watched]] = {"rewards": config.rewards, "watch": config.watch}
    rewards = [f"{t}.{n}.offload" for t, table in tables.items() for n, one in table.items() if one.offload == "apart"]
    return [*(["engine.encoders"] if config.engine.encoders == "apart" else []), *rewards]


def check_device(config: Config, device: torch.device) -> None:
    """UserError for what an Apple device (MPS) cannot do, or what nobody has seen it do."""
    if device.type != "mps":
        return
    if config.engine.base in ("fp8", "nf4"):
        raise UserError(f'engine.base: "{config.engine.base}" is not available on an Apple device (MPS); use int8')
    if config.engine.optimiser == "adamw8bit":
        raise UserError('engine.optimiser: "adamw8bit" is not available on an Apple device (MPS); use adamw')


def build_optimiser(config: Config, policy: Policy) -> torch.optim.Optimizer:
    """AdamW on the trained LoRA."""
    parameters = [parameter for _, parameter in policy.trainable]
    optimise = config.optimise
    arguments: dict[str, Any] = {"betas": optimise.betas, "weight_decay": optimise.weight_decay}
    optimiser: torch.optim.Optimizer
    if config.engine.optimiser == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        optimiser = cast(torch.optim.Optimizer, AdamW8bit(parameters, optimise.learning_rate, **arguments))
    else:
        optimiser = torch.optim.AdamW(parameters, optimise.learning_rate, **arguments)
    optimiser.register_step_post_hook(policy.lora.fused.forget)  # 8-bit kernels write past torch's count of changes
    return optimiser


def features_name(config: Config) -> str:
    """The feature space of the diversity measure."""
    name = config.evaluate.features
    return default_features(config.model) if name == "auto" else name


def meanings(run: Any) -> str:
    """What the values are that evaluations show, by the judges' cards: a line each, beginning with a line break."""
    config, lines = run.config, []
    for name, reward in run.judges.rewards.items():
        card, entry = getattr(reward, "card", None), config.rewards.get(name) or config.watch.get(name)
        given = ", ".join(f"{key} {value}" for key, value in (entry.arguments if entry else {}).items())
        about = f"{name}{f' ({given})' if given else ''}: {getattr(card, 'measures', 'a reward without a card')}"
        lines.append(f"{about}{' (lower is better)' if name in run.lower else ''}")
    lines.append("diversity: mean distance between the images of one prompt, in a space of features")
    if config.model in worlds():
        world = worlds()[config.model]
        lines += [f"{name}: {meaning}" for name, meaning in world.meanings.items()]
        texts = [prompt.text for prompt in [*run.source.stream.prompts, *run.evaluation.prompts]]
        if line := world.foreign(list(dict.fromkeys(texts))):
            log.warning("%s", line)
    lines.append("saturation: mean of the images' colour saturation; far from the untrained model's is a warning")
    return "".join(f"\n  {line if len(line) <= 116 else f'{line[:112]} ...'}" for line in lines)


def describe(run: Any) -> str:
    """One paragraph that says what is about to happen."""
    config, policy, spec = run.config, run.policy, run.spec
    parameters = sum(p.numel() for _, p in policy.trainable)
    rollout, images = config.rollout, config.rollout.images
    rewards = ", ".join(f"{n} x {config.rewards[n].weight:g}" for n in config.rewards)
    given = "" if config.image_set is None else f", {config.groups_of_set} from {config.image_set.source}"
    sharded = ", which share the network (FSDP2)" if policy.sharded else ""
    scouts = f" of {rollout.scout.images}" if rollout.scout else ""
    also = "".join(
        f"; judged on {one.source(config.model)}{f' with {one.merge}' if one.merge else ''}, too, as {name}"
        for name, one in config.evaluate.also.items()
    )
    return (
        f"{config.method.title} on {config.model}: {config.epochs} epochs of {images} images "
        f"({rollout.groups} prompts{given} x {rollout.group_size}{scouts}), {spec.steps} steps of {spec.sampler}; "
        f"{config.optimiser_steps} optimiser steps an epoch; LoRA rank "
        f"{config.lora.rank}, {parameters:,} parameters; rewards: {rewards}; "
        f"{run.accelerator.num_processes} process(es) on {policy.device}{sharded}{also}; run folder {run.folder.path}"
    )
