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
from diffrl.divgen.diversity import load_features
from diffrl.errors import UserError
from diffrl.methods.gardo.penalty import Gardo
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.policy.engine import check_launcher, join_processes
from diffrl.policy.sharding import plugin_of
from diffrl.prompts import MixedStream, Prompt, load_prompts, stream_of
from diffrl.records import checkpoint
from diffrl.records.held_out import read_held_out
from diffrl.records.hub import Pusher
from diffrl.records.verdict import Guard
from diffrl.report.data import FACES
from diffrl.rewards import learning
from diffrl.rewards.protocol import lower_is_better
from diffrl.rewards.scoring import applies
from diffrl.rewards.suspicion import Suspicions
from diffrl.rollout import Rollout, SamplerSpec
from diffrl.run.ahead import Ahead
from diffrl.run.calibrate import calibrate
from diffrl.run.direction import direction_metrics
from diffrl.run.evaluation import Evaluation
from diffrl.run.first_words import ask_rewards
from diffrl.run.fit import auto_micro_batch
from diffrl.run.folder import RunFolder
from diffrl.run.gallery import gallery
from diffrl.run.identity import contents, digests, of_training, started_with
from diffrl.run.interrupt import Interrupted
from diffrl.run.journal import Journal
from diffrl.run.learning import meet
from diffrl.run.loop import Loop, TrainingError
from diffrl.run.offline import Groups, Offline
from diffrl.run.parts import (
    build_composition,
    build_gradients,
    build_objective,
    build_optimiser,
    build_scorers,
    build_scouting,
    check_device,
    features_name,
    loop_settings,
    prepare_engine,
)
from diffrl.run.peers import Peers
from diffrl.run.processes import WAITING, check_agreement
from diffrl.run.showing import build_showing
from diffrl.run.start import Start, config_identity
from diffrl.run.students import load_students, on_students
from diffrl.run.teachers import load_teachers

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
        ask_rewards(config, self.accelerator.device)
        set_seed(config.seed)  # whatever draws from a global stream; the loop itself uses keyed generators
        device = self.accelerator.device
        check_device(config, device)
        # Before the network, beside which not every reward that is offloaded would have room.
        self.scorer, self.judges = build_scorers(config, device)
        self.policy = self._load(whole=sharding is None)
        students = load_students(config, self.policy)
        self.spec: SamplerSpec = config.rollout
        # With the reward models loaded: what they hold is not free.
        self.config = config = auto_micro_batch(config, device, self.accelerator, sharding is not None)
        self.lower = lower_is_better(self.judges.rewards)
        self.lower |= {*on_students(config, self.lower), *([FACES] if config.evaluate.divgen else [])}
        self.objective = build_objective(config, self.spec, self.scorer.rewards, self.lower)
        load_teachers(config, self.policy)  # before the snapshots, which begin as the student does
        self.snapshots = [*self.objective.snapshots, *(["ema"] if config.optimise.ema else [])]
        for name in self.snapshots:
            self.policy.add_snapshot(name)
        if sharding is not None:
            self.policy.shard(sharding, self.accelerator)
        prepare_engine(config, self.policy)
        self.groups = Groups(config) if config.image_set is not None else None  # of an image set
        train_prompts = load_prompts(config.prompts.train) if config.drawn_groups else []
        self._check_rewards(train_prompts or (self.groups.stream.prompts if self.groups else []))
        # Everything that shapes the run: kept in each checkpoint, and a resume must find the same.
        code = digests(config, {**self.judges.rewards, **self.scorer.rewards})
        check_agreement(self.accelerator, code, ALIKE)
        self.identity = config_identity(config) | contents(config) | of_training(config, code)
        self.features = load_features(features_name(config), device)
        self.optimiser = build_optimiser(config, self.policy)
        self.loop = self._loop()
        if isinstance(self.objective, Gardo) and self.objective.auxiliary:
            self.loop.inspect = self._keep_uncertain
        # The loop's phases on the CPU, timed where they happen; on an accelerator the host only enqueues work.
        if device.type == "cpu":
            self.loop.clock.watch(self.policy)
        guard = Guard.of(config.resolved(), self.lower)
        held_out = (self.judges, self.features, students, guard)
        self.evaluation = Evaluation(config, self.policy, self.judged, *held_out, self.folder, self.accelerator)
        self.ahead = self._ahead()
        shaped = [name for name, reward in config.rewards.items() if reward.shape.steps()]
        self.suspicions = Suspicions([name for name in config.rewards if name not in self.scorer.asking], shaped)
        self.epoch = 0
        self._kept: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None = None
        self.peers.rescue = self.leave

    def look_out_for(self, check: Callable[[], None]) -> None:
        """Ask `check`, which may raise, wherever the run can be left: between batches, and while a reward is busy."""
        self.loop.check = self.scorer.check = self.judges.check = self.evaluation.check = check

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

    def _loop(self) -> Loop:
        config, drawn, groups = self.config, self.config.drawn_groups, self.groups
        loop = Loop(
            self.policy,
            self.objective,
            self.scorer,
            torch.tensor([reward.weight for reward in config.rewards.values()]),
            groups.stream if groups and not drawn else stream_of(config.prompts.train, drawn, config.seed),
            self.spec,
            loop_settings(config),
            self.optimiser,
            self.accelerator,
            self.features,
            gradients=build_gradients(config),
            compose=build_composition(config),
            scouting=build_scouting(config),
            fp16=config.optimise.precision == "fp16",
        )
        self.offline = None if groups is None else Offline(config, self.policy, groups, loop)
        loop.source = self.offline or loop.source
        return loop

    def _ahead(self) -> Ahead:
        config = self.config
        files = {key: value for key, value in self.identity.items() if key.startswith(("model", "family"))}
        key = f"{files} {config.optimise.precision} {torch.__version__} {transformers.__version__}"
        tests = [prompt.text for prompt in self.evaluation.prompts]
        stream, folder = self.loop.stream, self.folder.path
        if self.groups is not None and config.drawn_groups:
            stream = MixedStream([stream, self.groups.stream])
        return Ahead(self.policy, stream, tests, config.epochs, self.accelerator, folder, key)

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

    def _keep_uncertain(self, epoch: int, rollout: Rollout) -> None:
        """In epochs that are evaluated: the images that GARDO's gate trusts least, for the report."""
        number, config = epoch + 1, self.config
        if number % config.evaluate.every and number != config.epochs:
            return
        assert isinstance(self.objective, Gardo)
        self.folder.save_gallery(number, *gallery(self.objective, self.policy, rollout, self.loop.processes.sum))

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
        if learned := learning.states(self.scorer.learning):
            tensors["learning"] = learned
        if own := self.objective.tensors():
            tensors["objective"] = own
        tensors["rng"], rng = checkpoint.rng_state()
        state = {"epoch": self.epoch, "loop": self.loop.state_dict(), "optimiser": optimiser, "rng": rng}
        return tensors, copy.deepcopy(state)

    def begin_epoch(self) -> None:
        """Before an epoch: calibrate the noise, once, if that is asked for; and keep in
        memory what the epoch goes back to if it is broken off, unless that is on the disk."""
        dense = self.config.dense
        if dense is not None and dense.calibrate is not None and self.loop.spec.noise_levels is None:
            calibrate(self.loop, dense.calibrate)
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
        learning.restore(self.scorer.learning, tensors.get("learning", {}))
        self.objective.load_tensors(tensors.get("objective", {}))
        checkpoint.set_rng_state(tensors["rng"], state["rng"])
        self.epoch = int(state["epoch"])
        lines = self.folder.lines() if self.epoch else []
        self.evaluation.past = [line for line in lines if line["epoch"] <= self.epoch and "eval/diversity" in line]
        self.evaluation.held = read_held_out(self.folder.path)
        # Killed between checkpoint and LoRA, the folder would hold the LoRA of the save before.
        self.folder.save_lora(self.policy, self.judged)

    def _pusher(self, journal: Journal) -> Pusher | None:
        """What sends the run to the hub, from the first process."""
        repository = self.config.checkpoint.push
        if repository is None or not self.main:
            return None
        return Pusher(self.folder.path, repository, journal.note)

    def train(self, journal: Journal) -> None:
        """Every epoch that is left, the evaluation before the first one, and what is saved in between."""
        config = self.config
        pusher = self._pusher(journal)
        self.loop.status = journal.status
        self.loop.showing = build_showing(config, self.folder.path, self.scorer)  # here: who replays asks nobody
        journal.status("encoding prompts")
        self.ahead.before(self.epoch, self.loop.check)
        if self.offline is not None:
            journal.status("encoding pictures")
            self.offline.prepare(range(self.epoch, config.epochs), self.accelerator, self.loop.check, journal.status)
        if self.epoch == 0:  # line 0 of the metrics: the model before training
            meet(self.loop)
            metrics: dict[str, Any] = {"epoch": 0, "step": 0, "samples": 0}
            self.evaluation.measure(metrics, journal, divgen=bool(config.evaluate.divgen))
            self.loop.clock.take()  # evaluation's forwards are not the first epoch's
            journal.log(metrics)
        while self.epoch < config.epochs:
            self.ahead.before(self.epoch, self.loop.check)
            self.begin_epoch()
            metrics = self.loop.run_epoch(self.epoch) | direction_metrics(self.scorer.rewards)
            self.epoch = metrics["epoch"] = self.epoch + 1  # counted from 1
            last = self.epoch == config.epochs
            evaluated = self.epoch % config.evaluate.every == 0 or last
            every = config.evaluate.divgen
            divgen = bool(every and (self.epoch % every == 0 or last))
            alarms = self.evaluation.measure(metrics, journal, evaluated, divgen)
            if evaluated or divgen:
                self.loop.clock.take()  # evaluation's forwards are not the next epoch's
            # The line first, then the checkpoint: killed in between, the epoch is trained again and its line is kept.
            journal.log(metrics)
            if self.main:
                scouts = None if self.loop.scouting is None else self.loop.scouting.warning()
                shown = [] if self.loop.showing is None else self.loop.showing.notes
                grown = self.suspicions.after(metrics, self.scorer.take_growth())
                for text in [*grown, *([scouts] if scouts else []), *shown]:
                    journal.note(text)
            stop = bool(alarms) and config.guard.stop and not last
            if self.epoch % config.checkpoint.every == 0 or last or stop:
                self.save()
            if "eval/diversity" in metrics:
                journal.report()
            if pusher is not None and (self.epoch % config.checkpoint.push_every == 0 or last or stop):
                pusher.wait() if last or stop else None
                pusher.push(self.epoch)
            for text in alarms:
                journal.note(f"ALARM: {text}")
            if stop:
                healthy = self.folder.path / "healthy"
                journal.note(f"guard.stop: ended after epoch {self.epoch}; the last healthy LoRA is {healthy}")
                break
        if pusher is not None:
            journal.status("sending the run to the hub")
            pusher.wait()
        self.ahead.end()

    def close(self) -> None:
        """Drop what waits to be scored."""
        self.scorer.close()
        self.judges.close()
