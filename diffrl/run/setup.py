"""From a config to the parts of a run, in four steps whose order matters: each takes what the steps before it give.

check      -> Checked    all processes were started alike, and what is asked can be had on this device
preflight  -> Rewards    the reward models: before the network, beside which not every one of them would have room
load       -> Loaded     the network with its LoRAs; micro-batches are measured while the reward models are loaded
build      -> Build      where images come from, what the config adds, the evaluation; and the loop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, set_seed

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.features import load_features
from diffrl.objectives.objective import Objective
from diffrl.plugins import installed
from diffrl.plugins import load as load_plugin
from diffrl.policy import Policy, load_policy
from diffrl.prompts import MixedStream, Prompt, stream_of
from diffrl.records.identity import Identity
from diffrl.rewards.answers import applies
from diffrl.rewards.protocol import lower_is_better
from diffrl.rewards.scoring import Scorer
from diffrl.run.build import (
    Build,
    build_composition,
    build_gradients,
    build_objective,
    build_optimiser,
    build_scorers,
    features_name,
    loop_settings,
)
from diffrl.run.clock import Clock
from diffrl.run.device import check_device, prepare_engine
from diffrl.run.evaluation import Evaluation
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import Monitor, RunHook
from diffrl.run.identity import contents, digests, of_training, started_with
from diffrl.run.loop import Loop
from diffrl.run.peers import Peers
from diffrl.run.processes import WAITING, Processes, check_agreement
from diffrl.run.source import Rollouts
from diffrl.run.start import config_identity

ALIKE = "start every process with the same config, prompts, weights and plugins"


@dataclass(frozen=True)
class Checked:
    """`sharding`: how the network is divided among the processes; None: it is not."""

    config: Config
    accelerator: Accelerator
    folder: RunFolder
    peers: Peers
    sharding: Any


@dataclass(frozen=True)
class Rewards:
    """`scorer`: of training images; `judges`: of held-out ones; `lower`: those of which a lower score is better."""

    scorer: Scorer
    judges: Scorer
    lower: frozenset[str]


@dataclass(frozen=True)
class Loaded:
    """`config`: with the size of micro-batches, where that was measured; `snapshots`: of the trained LoRA."""

    config: Config
    policy: Policy
    objective: Objective
    snapshots: list[str]

    @property
    def judged(self) -> str:
        """The snapshot that is evaluated: the averaged LoRA, or the trained one without an average."""
        return "ema" if self.config.optimise.ema.decay else "default"


def check(config: Config, folder: RunFolder | None, peers: Peers) -> Checked:
    """Compare what the processes were started with. UserError for what cannot be had."""
    from diffrl.launched import join_processes

    accelerator = peers.accelerator or join_processes(kwargs_handlers=[InitProcessGroupKwargs(timeout=WAITING)])
    folder = folder or RunFolder(Path(config.run_dir), accelerator.is_main_process)
    check_agreement(accelerator, started_with(config), ALIKE)
    sharding = None
    if accelerator.distributed_type != DistributedType.NO:
        from diffrl.policy.sharding import plugin_of

        sharding = plugin_of(accelerator)
    if sharding is not None and config.engine.base != "full":
        raise UserError(f'engine.base: "{config.engine.base}" under FSDP2: not tried together; use full')
    if accelerator.is_main_process:
        from diffrl.launched import check_launcher

        check_launcher(accelerator, config.optimise.precision)
    return Checked(config, accelerator, folder, peers, sharding)


def preflight(checked: Checked) -> Rewards:
    """Build the rewards. Those of a user's own files score two random images first, so that errors surface early."""
    config, device = checked.config, checked.accelerator.device
    if any(".py:" in (entry.plugin or "") for entry in {**config.rewards, **config.watch}.values()):
        from diffrl.run.preflight import smoke_test_rewards

        smoke_test_rewards(config, device)
    set_seed(config.seed)  # whatever draws from a global stream; the loop itself uses keyed generators
    check_device(config, device)
    scorer, judges = build_scorers(config, device)
    return Rewards(scorer, judges, lower_is_better(judges.rewards))


def load(checked: Checked, rewards: Rewards) -> Loaded:
    """Load the model, give it its LoRAs, and shard and prepare it."""
    config, accelerator = checked.config, checked.accelerator
    policy = _load_policy(config, accelerator.device, whole=checked.sharding is None)
    if config.optimise.micro_batch == "auto":
        measured = load_plugin("optimise.micro_batch", "auto")
        config = measured(config, accelerator.device, accelerator, checked.sharding is not None)
    objective = build_objective(config, config.rollout, rewards.scorer.rewards, rewards.lower)
    objective.prepare(policy)  # before the snapshots, which begin as the trained LoRA does
    snapshots = [*objective.snapshots, *(["ema"] if config.optimise.ema.decay else [])]
    for name in snapshots:
        policy.add_snapshot(name)
    if checked.sharding is not None:
        policy.shard(checked.sharding, accelerator)
    prepare_engine(config, policy)
    return Loaded(config, policy, objective, snapshots)


def _load_policy(config: Config, device: torch.device, whole: bool) -> Policy:
    """Loads the model. Without `whole` the weights stay in main memory until FSDP shards them."""
    from diffrl.config.loras import spec_of

    policy = load_policy(
        config.model,
        lora=spec_of(config.lora),
        precision=config.optimise.precision,
        device=device,
        resolution=config.rollout.resolution,
        start=config.lora.start,
        merge=config.lora.merge,
        keep_base=config.lora.reference == "base",
        seed=config.seed,
        family=config.family,
        text_length=config.text_length,
        base=config.engine.base,
        whole=whole,
    )
    if config.lora.start is not None and config.lora.reference == "start":
        policy.lora.hold_start()
    if config.optimise.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    return policy


def build(checked: Checked, rewards: Rewards, loaded: Loaded) -> tuple[Build, Loop, Identity]:
    """Put the rest together. The identity is what shapes the run: kept in each checkpoint, and a resume must find the
    same. UserError for rewards that could say nothing of these prompts."""
    config, policy, scorer = loaded.config, loaded.policy, rewards.scorer
    monitor, hooks, processes = Monitor(), list[RunHook](), Processes(checked.accelerator, Clock())
    features = load_features(features_name(config), policy.device)
    rollouts = _rollouts(loaded, scorer, features, processes, monitor, hooks)
    held_out = (rewards.judges, features, checked.folder, checked.accelerator, monitor, hooks)
    evaluation = Evaluation(config, policy, loaded.judged, *held_out)
    weights = torch.tensor([reward.weight for reward in config.rewards.values()])
    compose = build_composition(config)
    extended = Build(
        config=config,
        policy=policy,
        objective=loaded.objective,
        scorer=scorer,
        compose=compose,
        weights=weights,
        rollouts=rollouts,
        source=rollouts,
        processes=processes,
        monitor=monitor,
        folder=checked.folder,
        evaluation=evaluation,
        lower=rewards.lower,
        hooks=hooks,
    )
    _add(extended)
    _check_rewards(config, scorer, (rollouts if config.drawn_groups else extended.source).stream.prompts, processes)
    code = digests(config, {**rewards.judges.rewards, **scorer.rewards})
    evaluation.code = {key.partition(".")[2]: value for key, value in code.items()}
    check_agreement(checked.accelerator, code, ALIKE)
    identity = config_identity(config) | contents(config) | of_training(config, code)
    loop = Loop(
        policy,
        loaded.objective,
        scorer,
        weights,
        extended.source,
        loop_settings(config),
        build_optimiser(config, policy),
        processes,
        hooks=hooks,
        monitor=monitor,
        gradients=build_gradients(config),
        compose=compose,
        fp16=config.optimise.precision == "fp16",
    )
    processes.clock.watch(policy)
    return extended, loop, identity


def _rollouts(
    loaded: Loaded, scorer: Scorer, features: Any, processes: Processes, monitor: Monitor, hooks: list[RunHook]
) -> Rollouts:
    """The plain source of images: rollouts of the config's prompts."""
    config = loaded.config
    stream = (
        stream_of(config.prompts.train, config.drawn_groups, config.seed) if config.drawn_groups else MixedStream([])
    )
    return Rollouts(
        loaded.policy,
        loaded.objective,
        scorer,
        features,
        stream,
        config.rollout,
        seed=config.seed,
        group_size=config.rollout.group_size,
        batch_size=config.rollout.batch_size,
        processes=processes,
        monitor=monitor,
        hooks=hooks,
    )


def _add(build: Build) -> None:
    """What packages add, by name, and what the config's methods add."""
    for name in installed("addition"):
        load_plugin("addition", name)(build)
    for section in build.config.sections:
        section.build(build)


def _check_rewards(config: Config, scorer: Scorer, prompts: Sequence[Prompt], processes: Processes) -> None:
    """Refuse rewards that could never say anything, and groups that a group-wise reward could not see whole."""
    for name, reward in scorer.rewards.items():
        if not any(applies(reward, p.text, p.metadata) for p in prompts):
            table = "rewards" if name in config.rewards else "watch"
            where = f'prompts.train ("{config.prompts.train}")' if config.drawn_groups else "image_set"
            raise UserError(f"{table}.{name}: applies to none of the prompts of {where}")
    if scorer.groupwise and config.rollout.groups % processes.count:
        raise UserError(
            f"rollout.groups: {config.rollout.groups} prompts over {processes.count} processes would split groups, but "
            f'the reward "{scorer.groupwise[0]}" has to see them whole'
        )
