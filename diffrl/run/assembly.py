"""The trainer: policy, loop and evaluation, put together from a config. What it leaves behind is `RunFolder`'s."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.features import load_features
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.policy.engine import check_launcher, join_processes
from diffrl.policy.sharding import plugin_of
from diffrl.prompts import MixedStream, Prompt, stream_of
from diffrl.records import checkpoint
from diffrl.records.held_out import read_held_out
from diffrl.records.verdict import Guard
from diffrl.rewards.protocol import lower_is_better
from diffrl.rewards.scoring import applies
from diffrl.rollout import SamplerSpec
from diffrl.run.ahead import Ahead
from diffrl.run.build import Build, add_extras
from diffrl.run.clock import Clock
from diffrl.run.evaluation import Evaluation
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import Monitor, RunHook, restore, states
from diffrl.run.identity import contents, digests, of_training, started_with
from diffrl.run.interrupt import Interrupted
from diffrl.run.journal import Journal
from diffrl.run.loop import Loop, TrainingError
from diffrl.run.parts import (
    build_composition,
    build_gradients,
    build_objective,
    build_optimiser,
    build_scorers,
    check_device,
    features_name,
    loop_settings,
    prepare_engine,
)
from diffrl.run.peers import Peers
from diffrl.run.processes import WAITING, Processes, check_agreement
from diffrl.run.source import EpochSource, Rollouts
from diffrl.run.start import Start, config_identity

ALIKE = "start every process with the same config, prompts, weights and plugins"


class Run:
    """What trains: policy, loop and evaluation. `folder`: where to; None: the config's `run_dir`. `peers`: to watch."""

    def __init__(self, config: Config, folder: RunFolder | None = None, peers: Peers | None = None) -> None:
        self.config = config
        self.accelerator = join_processes(kwargs_handlers=[InitProcessGroupKwargs(timeout=WAITING)])
        self.main = self.accelerator.is_main_process
        self.folder = folder or RunFolder(Path(config.run_dir), self.main)
        self.peers = peers or Peers(self.folder)
        if peers is not None:
            peers.join(self.accelerator)
        check_agreement(self.accelerator, started_with(config), ALIKE)
        sharding = plugin_of(self.accelerator)
        if sharding is not None and config.engine.base != "full":
            raise UserError(f'engine.base: "{config.engine.base}" under FSDP2: not tried together; use full')
        if self.main:
            check_launcher(self.accelerator, config.optimise.precision)
        if any(".py:" in (entry.plugin or "") for entry in {**config.rewards, **config.watch}.values()):
            from diffrl.run.first_words import ask_rewards

            ask_rewards(config, self.accelerator.device)
        set_seed(config.seed)  # whatever draws from a global stream; the loop itself uses keyed generators
        device = self.accelerator.device
        check_device(config, device)
        # Before the network, beside which not every reward that is offloaded would have room.
        self.scorer, self.judges = build_scorers(config, device)
        self.policy = self._load(whole=sharding is None)
        self.spec: SamplerSpec = config.rollout
        # With the reward models loaded: what they hold is not free.
        if config.optimise.micro_batch == "auto":
            from diffrl.run.fit import auto_micro_batch

            self.config = config = auto_micro_batch(config, device, self.accelerator, sharding is not None)
        self.lower = lower_is_better(self.judges.rewards)
        self.objective = build_objective(config, self.spec, self.scorer.rewards, self.lower)
        self.objective.prepare(self.policy)  # before the snapshots, which begin as the trained LoRA does
        self.snapshots = [*self.objective.snapshots, *(["ema"] if config.optimise.ema else [])]
        for name in self.snapshots:
            self.policy.add_snapshot(name)
        if sharding is not None:
            self.policy.shard(sharding, self.accelerator)
        prepare_engine(config, self.policy)
        self.features = load_features(features_name(config), device)
        self.monitor, self.hooks = Monitor(), list[RunHook]()
        self.processes = Processes(self.accelerator, Clock())
        self.weights = torch.tensor([reward.weight for reward in config.rewards.values()])
        self.compose = build_composition(config)
        self.rollouts = self._rollouts()
        self.evaluation = self._evaluation()
        self.source = self._extras()
        self.lower = self.lower.union(*(hook.lower for hook in self.hooks))
        self._check_rewards((self.rollouts if config.drawn_groups else self.source).stream.prompts)
        # Everything that shapes the run: kept in each checkpoint, and a resume must find the same.
        code = digests(config, {**self.judges.rewards, **self.scorer.rewards})
        check_agreement(self.accelerator, code, ALIKE)
        self.identity = config_identity(config) | contents(config) | of_training(config, code)
        self.optimiser = build_optimiser(config, self.policy)
        self.loop = self._loop()
        # The loop's phases on the CPU, timed where they happen; on an accelerator the host only enqueues work.
        if device.type == "cpu":
            self.loop.clock.watch(self.policy)
        self.ahead = self._ahead()
        self.epoch = 0
        self._kept: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None = None
        self.peers.rescue = self.leave

    def look_out_for(self, check: Callable[[], None]) -> None:
        """Ask `check`, which may raise, wherever the run can be left: between batches, and while a reward is busy."""
        self.monitor.check = self.scorer.check = self.judges.check = check

    def _load(self, whole: bool) -> Policy:
        """The model with its trained LoRA; not `whole`: the network waits in main memory to be sharded."""
        config = self.config
        policy = load_policy(
            config.model,
            lora=LoraSpec(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets),
            precision=config.optimise.precision,
            device=self.accelerator.device,
            resolution=config.rollout.resolution,
            seed=config.seed,
            family=config.family,
            base=config.engine.base,
            whole=whole,
        )
        if config.optimise.gradient_checkpointing:
            policy.enable_gradient_checkpointing()
        return policy

    def _rollouts(self) -> Rollouts:
        config, drawn = self.config, self.config.drawn_groups
        return Rollouts(
            self.policy,
            self.objective,
            self.scorer,
            self.features,
            stream_of(config.prompts.train, drawn, config.seed) if drawn else MixedStream([]),
            self.spec,
            seed=config.seed,
            group_size=config.rollout.group_size,
            batch_size=config.rollout.batch_size,
            processes=self.processes,
            monitor=self.monitor,
            hooks=self.hooks,
        )

    def _extras(self) -> EpochSource:
        """What the config adds to a plain run: its hooks, and the source that they make of the rollouts."""
        build = Build(
            self.config,
            self.policy,
            self.objective,
            self.scorer,
            self.compose,
            self.weights,
            self.rollouts,
            self.rollouts,
            self.processes,
            self.monitor,
            self.folder,
            self.evaluation,
            self.lower,
            self.hooks,
        )
        add_extras(build)
        return build.source

    def _evaluation(self) -> Evaluation:
        students = self.config.evaluate.also
        lower = {*self.lower, *(f"{student}/{name}" for student in students for name in self.lower)}
        return Evaluation(
            self.config,
            self.policy,
            self.judged,
            self.judges,
            self.features,
            Guard.of(self.config.resolved(), lower),
            self.folder,
            self.accelerator,
            self.monitor,
            self.hooks,
        )

    def _loop(self) -> Loop:
        return Loop(
            self.policy,
            self.objective,
            self.scorer,
            self.weights,
            self.source,
            loop_settings(self.config),
            self.optimiser,
            self.processes,
            hooks=self.hooks,
            monitor=self.monitor,
            gradients=build_gradients(self.config),
            compose=self.compose,
            fp16=self.config.optimise.precision == "fp16",
        )

    def _ahead(self) -> Ahead:
        config = self.config
        files = {key: value for key, value in self.identity.items() if key.startswith(("model", "family"))}
        key = f"{files} {config.optimise.precision} {torch.__version__} {transformers.__version__}"
        tests = [prompt.text for prompt in self.evaluation.prompts]
        return Ahead(self.policy, self.source.stream, tests, config.epochs, self.accelerator, self.folder.path, key)

    def _check_rewards(self, prompts: Sequence[Prompt]) -> None:
        """Refuse rewards that could never say anything, and groups that a group-wise reward could not see whole."""
        config, world = self.config, self.accelerator.num_processes
        for name, reward in self.scorer.rewards.items():
            if not any(applies(reward, p.text, p.metadata) for p in prompts):
                table = "rewards" if name in config.rewards else "watch"
                given = config.image_set is not None and not config.drawn_groups
                where = "image_set" if given else f'prompts.train ("{config.prompts.train}")'
                raise UserError(f"{table}.{name}: applies to none of the prompts of {where}")
        if self.scorer.groupwise and config.rollout.groups % world:
            raise UserError(
                f"rollout.groups: {config.rollout.groups} prompts over {world} processes would split groups, but the "
                f'reward "{self.scorer.groupwise[0]}" has to see them whole'
            )

    @property
    def judged(self) -> str:
        """The snapshot that is evaluated: the averaged LoRA, or the trained one without an average."""
        return "ema" if self.config.optimise.ema else "default"

    def save(self) -> None:
        """A complete checkpoint of everything that shapes the future, and the LoRA for others to load."""
        with self.peers.turn:
            if self.main:
                self.folder.save(*self._state(), self.config.checkpoint.keep, self.identity)
            self._kept = None
        self.folder.save_lora(self.policy, self.judged)
        self.accelerator.wait_for_everyone()

    def _state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Copies of the tensors, and the rest."""
        tensors = {"lora": self.policy.state("default")}
        tensors |= {name: self.policy.state(name) for name in self.snapshots}
        moments, optimiser = checkpoint.optimiser_to_tensors(self.optimiser)
        tensors["optimiser"] = {key: value.to("cpu", copy=True) for key, value in moments.items()}
        added, hooks = states(self.hooks)
        tensors |= added
        if own := self.objective.tensors():
            tensors["objective"] = own
        tensors["rng"], rng = checkpoint.rng_state()
        state = {
            "epoch": self.epoch,
            "loop": self.loop.state_dict(),
            "hooks": hooks,
            "optimiser": optimiser,
            "rng": rng,
        }
        return tensors, copy.deepcopy(state)

    def prepare(self) -> None:
        """Before a checkpoint is restored, and before anything is trained."""
        for hook in self.hooks:
            hook.prepare()

    def begin(self) -> None:
        """Before the first epoch that is trained here, and before the evaluation of the untrained model."""
        for hook in self.hooks:
            hook.begin(self.epoch)
        for number in range(0 if self.epoch else self.objective.warmup):
            self.monitor.status("the objective learns from the model's own images")
            self.loop.warm_up(self.rollouts.beside(f"warm-up {number}"), f"warm-up {number}")

    def begin_epoch(self) -> None:
        """Keep in memory what the epoch goes back to if it is broken off, unless that is on the disk."""
        on_disk = self.epoch % self.config.checkpoint.every == 0
        self._kept = self._state() if self.main and not on_disk else None

    def leave(self, error: TrainingError | Interrupted) -> None:
        """The epoch is broken off: its beginning goes to the disk, and what is known of a failure beside it.

        Nobody waits for the others here: they may have ended already.
        """
        if not self.main:
            return
        if self._kept is not None:
            self.folder.save(*self._kept, self.config.checkpoint.keep, self.identity)
        if isinstance(error, TrainingError) and error.details:
            self.folder.save_failure(error, error.details)

    def restore(self, start: Start | None = None) -> None:
        """Continue where `start` says (None: at the newest intact checkpoint); from the beginning if it has no path."""
        path = checkpoint.latest(self.folder.path) if start is None else start.path
        if start is not None:
            start.compare(self.identity)
        step = None if path is None else path.name
        check_agreement(self.accelerator, {"--resume": step}, "RUN_DIR must be on a shared disk")
        if path is None:
            return
        tensors, state = checkpoint.load(path)
        self.policy.load_state("default", tensors["lora"])
        for name in self.snapshots:
            self.policy.load_state(name, tensors[name])
        asked = [{key: group[key] for key in ("lr", "betas", "weight_decay")} for group in self.optimiser.param_groups]
        checkpoint.optimiser_from_tensors(self.optimiser, tensors["optimiser"], state["optimiser"])
        for group, values in zip(self.optimiser.param_groups, asked, strict=True):
            group.update(values)  # the config's: the same as then, unless a change was asked for
        self.loop.load_state_dict(state["loop"])
        restore(self.hooks, tensors, state["hooks"])
        self.objective.load_tensors(tensors.get("objective", {}))
        checkpoint.set_rng_state(tensors["rng"], state["rng"])
        self.epoch = int(state["epoch"])
        lines = self.folder.lines() if self.epoch else []
        self.evaluation.past = [line for line in lines if line["epoch"] <= self.epoch and "eval/diversity" in line]
        self.evaluation.held = read_held_out(self.folder.path)
        # Killed between checkpoint and LoRA, the folder would hold the LoRA of the save before.
        self.folder.save_lora(self.policy, self.judged)

    def train(self, journal: Journal) -> None:
        """Every epoch that is left, the evaluation before the first one, and what is saved in between."""
        config = self.config
        self.monitor.status, self.monitor.note = journal.status, journal.note
        journal.status("encoding prompts")
        self.ahead.before(self.epoch, self.monitor.check)
        self.begin()
        if self.epoch == 0:  # line 0 of the metrics: the model before training
            metrics: dict[str, Any] = {"epoch": 0, "step": 0, "samples": 0}
            self.evaluation.measure(metrics, journal)
            journal.log(metrics)
        while self.epoch < config.epochs:
            self.ahead.before(self.epoch, self.monitor.check)
            self.begin_epoch()
            metrics = self.loop.run_epoch(self.epoch)
            self.epoch = metrics["epoch"] = self.epoch + 1  # counted from 1
            notes = [text for hook in self.hooks for text in hook.after_epoch(metrics)]
            last = self.epoch == config.epochs
            alarms = self.evaluation.measure(metrics, journal, self.epoch % config.evaluate.every == 0 or last)
            # The line first, then the checkpoint: killed in between, the epoch is trained again and its line is kept.
            journal.log(metrics)
            for text in notes:
                journal.note(text)
            stop = bool(alarms) and config.guard.stop and not last
            if self.epoch % config.checkpoint.every == 0 or last or stop:
                self.save()
            for text in alarms:
                journal.note(f"ALARM: {text}")
            for hook in self.hooks:
                hook.end_epoch(metrics, last or stop)
            if stop:
                healthy = self.folder.path / "healthy"
                journal.note(f"guard.stop: ended after epoch {self.epoch}; the last healthy LoRA is {healthy}")
                break
        self.ahead.end()

    def close(self) -> None:
        """Drop what waits to be scored."""
        self.scorer.close()
        self.judges.close()
