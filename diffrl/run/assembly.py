"""The trainer: policy, loop and evaluation, put together from a config. What it leaves behind is `RunFolder`'s."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor

from diffrl.config import Config
from diffrl.divgen.diversity import load_features
from diffrl.divgen.prompts import world_of
from diffrl.divgen.run import SmallBenchmark
from diffrl.errors import UserError
from diffrl.evaluation import Evaluated, score_policy, summarise
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.policy.engine import check_launcher, join_processes
from diffrl.policy.sharding import plugin_of
from diffrl.prompts import Prompt, load_prompts, stream_of
from diffrl.records import checkpoint
from diffrl.report.data import FACES
from diffrl.rewards.protocol import lower_is_better
from diffrl.rewards.scoring import applies
from diffrl.rewards.suspicion import Suspicions
from diffrl.rollout import Rollout, SamplerSpec, generate
from diffrl.run.calibrate import calibrate
from diffrl.run.direction import direction_metrics
from diffrl.run.fit import auto_micro_batch
from diffrl.run.folder import RunFolder
from diffrl.run.gallery import gallery
from diffrl.run.identity import contents, digests, started_with
from diffrl.run.interrupt import Interrupted
from diffrl.run.journal import Journal
from diffrl.run.loop import Loop, TrainingError
from diffrl.run.parts import (
    build_composition,
    build_gradients,
    build_guard,
    build_objective,
    build_optimiser,
    build_scorers,
    evaluation_spec,
    features_name,
    loop_settings,
    prepare_engine,
)
from diffrl.run.processes import check_agreement
from diffrl.run.start import Start, config_identity
from diffrl.run.students import load_students, on_students
from diffrl.trainers.gardo import Gardo

ALIKE = "start every process with the same config, prompts, weights and plugins"


class Run:
    """What trains: policy, loop and evaluation. `folder`: where to; None: the config's `run_dir`."""

    def __init__(self, config: Config, folder: RunFolder | None = None) -> None:
        self.config = config
        # The main process writes reports and images alone, and one process's rewards may be slow: the others wait.
        waiting = InitProcessGroupKwargs(timeout=timedelta(hours=2))
        self.accelerator = join_processes(kwargs_handlers=[waiting])
        self.main = self.accelerator.is_main_process
        check_agreement(self.accelerator, started_with(config), ALIKE)
        sharding = plugin_of(self.accelerator)
        if sharding is not None and config.engine.base != "full":
            raise UserError(f'engine.base: "{config.engine.base}" under FSDP2: not tried together; use full')
        if self.main:
            check_launcher(self.accelerator, config.optimise.precision)
        self.folder = folder or RunFolder(Path(config.run_dir), self.main)
        set_seed(config.seed)  # whatever draws from a global stream; the loop itself uses keyed generators
        device = self.accelerator.device
        self.policy = load_policy(
            config.model,
            lora=LoraSpec(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets),
            precision=config.optimise.precision,
            device=device,
            resolution=config.rollout.resolution,
            seed=config.seed,
            family=config.family,
            base=config.engine.base,
        )
        if config.optimise.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
        self.students = load_students(config, self.policy)
        self.spec: SamplerSpec = config.rollout
        self.scorer, self.judges = build_scorers(config, device)
        # With the reward models loaded: what they hold is not free.
        self.config = config = auto_micro_batch(config, device, self.accelerator, sharding is not None)
        self.lower = lower_is_better(self.judges.rewards)
        self.lower |= {*on_students(config, self.lower), *([FACES] if config.evaluate.divgen else [])}
        self.objective = build_objective(config, self.spec, self.scorer.rewards, self.lower)
        self.snapshots = [*self.objective.snapshots, *(["ema"] if config.optimise.ema else [])]
        for name in self.snapshots:
            self.policy.add_snapshot(name)
        if sharding is not None:
            self.policy.shard(sharding, self.accelerator)
        prepare_engine(config, self.policy)
        train_prompts = load_prompts(config.prompts.train)
        self._check_rewards(train_prompts)
        self.test_prompts = load_prompts(config.prompts.test)[: config.evaluate.prompts]
        # Everything that shapes the run: kept in each checkpoint, and a resume must find the same.
        rewards = {**self.judges.rewards, **self.scorer.rewards}
        plugins = digests(config, rewards)
        check_agreement(self.accelerator, plugins | digests(config, rewards, "watch"), ALIKE)
        self.identity = config_identity(config) | contents(config) | plugins
        self.features = load_features(features_name(config), device)
        self.optimiser = build_optimiser(config, self.policy)
        self.loop = self._loop()
        if isinstance(self.objective, Gardo) and self.objective.auxiliary:
            self.loop.inspect = self._keep_uncertain
        # The loop's phases on the CPU, timed where they happen; on an accelerator the host only enqueues work.
        if device.type == "cpu":
            self.loop.clock.watch(self.policy)
        self.divgen: SmallBenchmark | None = None
        if config.evaluate.divgen:
            self.divgen = SmallBenchmark(world_of(config.model), config.evaluate.per_prompt, device)
        self.guard = build_guard(config, self.lower)
        shaped = [name for name, reward in config.rewards.items() if reward.shape.steps()]
        self.suspicions = Suspicions(list(config.rewards), shaped)
        self.past: list[dict[str, Any]] = []  # what the evaluations measured so far, the first one before training
        self.epoch = 0
        self._kept: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None = None

    def look_out_for(self, check: Callable[[], None]) -> None:
        """Ask `check`, which may raise, wherever the run can be left: between batches, and while a reward is busy."""
        self.loop.check = self.scorer.check = self.judges.check = check

    def _loop(self) -> Loop:
        config = self.config
        return Loop(
            self.policy,
            self.objective,
            self.scorer,
            torch.tensor([reward.weight for reward in config.rewards.values()]),
            stream_of(config.prompts.train, config.rollout.groups, config.seed),
            self.spec,
            loop_settings(config),
            self.optimiser,
            self.accelerator,
            self.features,
            gradients=build_gradients(config),
            compose=build_composition(config),
            fp16=config.optimise.precision == "fp16",
        )

    def _check_rewards(self, prompts: Sequence[Prompt]) -> None:
        """Refuse rewards that could never say anything, and groups that a group-wise reward could not see whole."""
        config, world = self.config, self.accelerator.num_processes
        for name, reward in self.scorer.rewards.items():
            if not any(applies(reward, p.text, p.metadata) for p in prompts):
                source, table = config.prompts.train, "rewards" if name in config.rewards else "watch"
                raise UserError(f'{table}.{name}: applies to none of the prompts of prompts.train ("{source}")')
        if self.scorer.groupwise and config.rollout.groups % world:
            raise UserError(
                f"rollout.groups: {config.rollout.groups} prompts over {world} processes would split groups, but the "
                f'reward "{self.scorer.groupwise[0]}" has to see them whole'
            )

    def evaluate(self) -> dict[str, Any]:
        """Held-out scores of the averaged LoRA (or the trained one without an average), with fixed seeds.

        On the model, and on its students as `eval/STUDENT/...`.
        """
        found = self._judge(self.policy, evaluation_spec(self.config), self.judged)
        means = summarise(self.judges.names, found.scores) | found.breadth()
        spread = float(found.saturation.std(correction=0))
        means |= {"saturation": float(found.saturation.mean()), "saturation/std": spread}
        for student in self.students:
            with student.wearing(self.policy.state(self.judged)) as policy:
                found = self._judge(policy, student.spec, "default")
            values = summarise(self.judges.names, found.scores) | found.breadth()
            means |= {f"{student.name}/{name}": value for name, value in values.items()}
        return {f"eval/{name}": value for name, value in means.items()}

    def _judge(self, policy: Policy, spec: SamplerSpec, snapshot: str) -> Evaluated:
        """The held-out prompts' images of a model, scored; every process draws its share."""
        return score_policy(
            policy,
            self.judges,
            self.features,
            self.test_prompts,
            spec,
            seed=self.config.seed,
            per_prompt=self.config.evaluate.per_prompt,
            batch_size=self.config.rollout.batch_size,
            accelerator=self.accelerator,
            snapshot=snapshot,
            check=self.loop.check,
        )

    def _look_out(self, metrics: dict[str, Any]) -> list[str]:
        """The guard rails' alarms for an evaluation's metrics, into which they are written.

        Without any the LoRA is marked as healthy: `RUN_DIR/healthy` has the last such one for diffusers to load.
        """
        self.past.append(dict(metrics))
        alarms = self.guard.alarms(self.past)
        for alarm in alarms:
            metrics[f"alarm/{alarm.name}"] = alarm.text
        if self.epoch and not alarms:
            self.folder.save_healthy(self.policy, self.judged, metrics)
        return [alarm.text for alarm in alarms]

    def measure_diversity(self) -> dict[str, Any]:
        """DivGenBench's small version on the averaged LoRA, with fixed seeds."""
        assert self.divgen is not None
        return self.divgen.measure(
            self.policy,
            evaluation_spec(self.config),
            seed=self.config.seed,
            batch_size=self.config.rollout.batch_size,
            accelerator=self.accelerator,
            snapshot=self.judged,
        )

    @property
    def judged(self) -> str:
        return "ema" if self.config.optimise.ema else "default"

    def _draw_samples(self, epoch: int, journal: Journal) -> None:
        """The fixed prompts with their fixed seeds, as PNG and to the trackers; the main process draws them."""
        prompts = self.test_prompts[: self.config.tracking.samples]
        if not prompts:
            return
        with self.policy.together():
            if not self.main:
                return
            batches = generate(
                self.policy,
                prompts,
                evaluation_spec(self.config),
                seed=self.config.seed,
                per_prompt=1,
                batch_size=self.config.rollout.batch_size,
                snapshot=self.judged,
            )
            images, texts = torch.cat([batch for _, batch in batches]), [prompt.text for prompt in prompts]
            journal.images(epoch, self.folder.save_samples(epoch, images, texts, self.config.seed), texts)

    def _keep_uncertain(self, epoch: int, rollout: Rollout) -> None:
        """In epochs that are evaluated: the images that GARDO's gate trusts least, for the report."""
        number, config = epoch + 1, self.config
        if number % config.evaluate.every and number != config.epochs:
            return
        assert isinstance(self.objective, Gardo)
        self.folder.save_gallery(number, *gallery(self.objective, self.policy, rollout, self.loop.processes.sum))

    def save(self) -> None:
        """A complete checkpoint of everything that shapes the future, and the LoRA for others to load."""
        if self.main:
            self.folder.save(*self._state(), self.config.checkpoint.keep, self.identity)
        self.folder.save_lora(self.policy, self.judged)
        self.accelerator.wait_for_everyone()

    def _state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Copies of the tensors, and the rest."""
        tensors = {"lora": self.policy.state("default")}
        tensors |= {name: self.policy.state(name) for name in self.snapshots}
        moments, optimiser = checkpoint.optimiser_to_tensors(self.optimiser)
        tensors["optimiser"] = {key: value.to("cpu", copy=True) for key, value in moments.items()}
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
        checkpoint.set_rng_state(tensors["rng"], state["rng"])
        self.epoch = int(state["epoch"])
        lines = self.folder.lines() if self.epoch else []
        self.past = [line for line in lines if line["epoch"] <= self.epoch and "eval/diversity" in line]
        # Killed between checkpoint and LoRA, the folder would hold the LoRA of the save before.
        self.folder.save_lora(self.policy, self.judged)

    def train(self, journal: Journal) -> None:
        """Every epoch that is left, the evaluation before the first one, and what is saved in between."""
        config = self.config
        self.loop.status = journal.status
        if self.epoch == 0:  # line 0 of the metrics: the model before training
            metrics: dict[str, Any] = {"epoch": 0, "step": 0, "samples": 0}
            self._measure(metrics, journal, divgen=self.divgen is not None)
            journal.log(metrics)
        while self.epoch < config.epochs:
            self.begin_epoch()
            metrics = self.loop.run_epoch(self.epoch) | direction_metrics(self.scorer.rewards)
            self.epoch = metrics["epoch"] = self.epoch + 1  # counted from 1
            last = self.epoch == config.epochs
            evaluated = self.epoch % config.evaluate.every == 0 or last
            every = config.evaluate.divgen
            divgen = bool(every and (self.epoch % every == 0 or last))
            alarms = self._measure(metrics, journal, evaluated, divgen)
            # The line first, then the checkpoint: killed in between, the epoch is trained again and its line is kept.
            journal.log(metrics)
            if self.main:
                for text in self.suspicions.after(metrics, self.scorer.take_growth()):
                    journal.note(text)
            stop = bool(alarms) and config.guard.stop and not last
            if self.epoch % config.checkpoint.every == 0 or last or stop:
                self.save()
            if "eval/diversity" in metrics:
                journal.report()
            for text in alarms:
                journal.note(f"ALARM: {text}")
            if stop:
                healthy = self.folder.path / "healthy"
                journal.note(f"guard.stop: ended after epoch {self.epoch}; the last healthy LoRA is {healthy}")
                return

    def _measure(
        self, metrics: dict[str, Any], journal: Journal, evaluated: bool = True, divgen: bool = False
    ) -> list[str]:
        """Evaluate, and measure DivGenBench's small version, into `metrics`; returns the guard rails' alarms."""
        alarms: list[str] = []
        mark = time.perf_counter()
        if evaluated:
            journal.status("evaluating")
            metrics |= self.evaluate()
            self._draw_samples(metrics["epoch"], journal)
            alarms = self._look_out(metrics)
        if divgen:
            journal.status("evaluating, DivGenBench")
            metrics |= self.measure_diversity()
        if evaluated or divgen:
            metrics["seconds/evaluate"] = round(time.perf_counter() - mark, 4)
            self.loop.clock.take()  # evaluation's forwards are not the next epoch's
        return alarms

    def close(self) -> None:
        """Drop what waits to be scored."""
        self.scorer.close()
        self.judges.close()
