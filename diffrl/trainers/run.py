"""`diffrl train`: from a config to a run folder, with evaluation, checkpoints and an exact resume."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from PIL import Image
from rich.console import Console

from diffrl import checkpoint
from diffrl import config as configs
from diffrl.config import Config
from diffrl.divgen.diversity import load_features
from diffrl.errors import UserError
from diffrl.evaluation import score_policy, summarise
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.progress import ProgressTable, summary
from diffrl.prompts import Prompt, load_prompts, stream_of
from diffrl.report import write_report
from diffrl.report.data import lower_is_better
from diffrl.report.gardo import save_uncertain
from diffrl.rewards.scoring import applies
from diffrl.rollout import Rollout, generate
from diffrl.tracking import Tracker, read_metrics, record_environment, save_samples
from diffrl.trainers.d2align import direction_metrics, prepare_direction
from diffrl.trainers.gardo import Gardo
from diffrl.trainers.loop import Clock, Loop
from diffrl.trainers.parts import (
    build_gradients,
    build_objective,
    build_scorers,
    evaluation_spec,
    features_name,
    loop_settings,
    sampler_spec,
)


class Run:
    """Everything that one run holds; `train` drives it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        # The main process writes reports and images alone, and one process's rewards may be slow: the others wait.
        waiting = InitProcessGroupKwargs(timeout=timedelta(hours=2))
        self.accelerator = Accelerator(kwargs_handlers=[waiting])
        self.main = self.accelerator.is_main_process
        self.folder = Path(config.run_dir)
        set_seed(config.seed)  # whatever draws from a global stream; the loop itself uses keyed generators
        device = self.accelerator.device
        self.policy = load_policy(
            config.model,
            lora=LoraSpec(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets),
            precision=config.optimise.precision,
            device=device,
            resolution=config.rollout.resolution,
            seed=config.seed,
        )
        if config.optimise.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
        self.spec = sampler_spec(config)
        self.scorer, self.judges = build_scorers(config, device)
        self.objective = build_objective(config, self.spec, self.scorer.rewards)
        self.snapshots = [*self.objective.snapshots, *(["ema"] if config.optimise.ema else [])]
        for name in self.snapshots:
            self.policy.add_snapshot(name)
        train_prompts = load_prompts(config.prompts.train)
        # An epoch's prompts are a function of seed, epoch and this list, so a resume must find the same list.
        self.prompts_digest = hashlib.sha256("\n".join(p.text for p in train_prompts).encode()).hexdigest()
        self._check_rewards(train_prompts)
        self.test_prompts = load_prompts(config.prompts.test)[: config.evaluate.prompts]
        self.features = load_features(features_name(config), device)
        weights = torch.tensor([config.rewards[name].weight for name in config.rewards])
        self.optimiser = torch.optim.AdamW(
            [parameter for _, parameter in self.policy.trainable],
            lr=config.optimise.learning_rate,
            betas=config.optimise.betas,
            weight_decay=config.optimise.weight_decay,
        )
        self.loop = Loop(
            self.policy,
            self.objective,
            self.scorer,
            weights,
            stream_of(config.prompts.train, config.rollout.groups, config.seed),
            self.spec,
            loop_settings(config),
            self.optimiser,
            self.accelerator,
            self.features,
            gradients=build_gradients(config),
            fp16=config.optimise.precision == "fp16",
        )
        if isinstance(self.objective, Gardo) and self.objective.auxiliary:
            self.loop.inspect = self.keep_uncertain
        # The loop's phases on the CPU, timed where they happen; on an accelerator the host only enqueues work.
        if device.type == "cpu":
            _time_calls(self.policy, self.loop.clock)
        self.epoch = 0

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
        """Held-out scores of the averaged LoRA (or the trained one without an average), with fixed seeds."""
        config = self.config
        scores, diversity = score_policy(
            self.policy,
            self.judges,
            self.features,
            self.test_prompts,
            evaluation_spec(config),
            seed=config.seed,
            per_prompt=config.evaluate.per_prompt,
            batch_size=config.rollout.batch_size,
            accelerator=self.accelerator,
            snapshot=self.judged,
        )
        means = summarise(self.judges.names, scores)
        return {f"eval/{name}": value for name, value in means.items()} | {"eval/diversity": diversity}

    @property
    def judged(self) -> str:
        return "ema" if self.config.optimise.ema else "default"

    def draw_samples(self, epoch: int, tracker: Tracker | None) -> None:
        """The fixed prompts with their fixed seeds, as PNG and to the trackers; the main process draws them."""
        count = min(self.config.tracking.samples, len(self.test_prompts))
        if tracker is None or not count:
            return
        prompts = self.test_prompts[:count]
        batches = generate(
            self.policy,
            prompts,
            evaluation_spec(self.config),
            seed=self.config.seed,
            per_prompt=1,
            batch_size=self.config.rollout.batch_size,
            snapshot=self.judged,
        )
        images = torch.cat([batch for _, batch in batches])
        texts = [prompt.text for prompt in prompts]
        paths = save_samples(self.folder, epoch, images, texts, [self.config.seed] * count)
        tracker.images(epoch, [Image.open(path) for path in paths], texts)

    def keep_uncertain(self, epoch: int, rollout: Rollout) -> None:
        """In epochs that are evaluated: the images that GARDO's gate trusts least, for the report."""
        number, config = epoch + 1, self.config
        if number % config.evaluate.every and number != config.epochs:
            return
        assert isinstance(self.objective, Gardo)
        images, rows = self.objective.exhibit(self.policy, rollout, self.loop._sum)
        if self.main:
            save_uncertain(self.folder, number, images, rows)

    def save(self) -> None:
        """A complete checkpoint of everything that shapes the future, and the LoRA for others to load."""
        if self.main:
            tensors = {"lora": self.policy.state("default")}
            tensors |= {name: self.policy.state(name) for name in self.snapshots}
            tensors["optimiser"], optimiser = checkpoint.optimiser_to_tensors(self.optimiser)
            tensors["rng"], rng = checkpoint.rng_state()
            state = {"epoch": self.epoch, "loop": self.loop.state_dict(), "optimiser": optimiser, "rng": rng}
            state["prompts"] = self.prompts_digest
            checkpoint.save(self.folder, self.loop.step, tensors, state, keep=self.config.checkpoint.keep)
            self.policy.save_lora(self.folder / "lora", self.judged)
        self.accelerator.wait_for_everyone()

    def restore(self) -> None:
        """Continue from the newest intact checkpoint; from the start if none was written yet."""
        path = checkpoint.latest(self.folder)
        if path is None:
            return
        tensors, state = checkpoint.load(path)
        if state["prompts"] != self.prompts_digest:
            raise UserError(
                f"prompts.train: {self.config.prompts.train} has changed since {path}; a resume needs the same prompts"
            )
        self.policy.load_state("default", tensors["lora"])
        for name in self.snapshots:
            self.policy.load_state(name, tensors[name])
        checkpoint.optimiser_from_tensors(self.optimiser, tensors["optimiser"], state["optimiser"])
        self.loop.load_state_dict(state["loop"])
        checkpoint.set_rng_state(tensors["rng"], state["rng"])
        self.epoch = int(state["epoch"])
        if self.main:  # killed between checkpoint and LoRA, the folder would hold the LoRA of the save before
            self.policy.save_lora(self.folder / "lora", self.judged)

    def check_agreement(self) -> None:
        """Every process must have found the same checkpoint, or they would wait for each other forever."""
        steps = self.accelerator.gather(torch.tensor([self.loop.step], device=self.accelerator.device))
        if steps.min() != steps.max():
            raise UserError("--resume: the processes see different checkpoints; RUN_DIR must be on a shared disk")

    def close(self) -> None:
        """Drop what waits to be scored."""
        self.scorer.close()
        self.judges.close()


def train(config: Config, resume: Path | None = None, dry_run: bool = False) -> None:
    """Run or resume a training; see the module's documentation and `diffrl train --help`.

    Raises:
        UserError: for what the config asks and cannot be had, before anything is written.
        RewardError, TrainingError: when the run cannot go on; the last checkpoint is intact.
    """
    folder = Path(config.run_dir) if resume is None else resume
    # Only the first process looks: it may have begun to write while the others still start.
    if resume is None and not dry_run and os.environ.get("RANK", "0") == "0" and _holds_a_run(folder):
        raise UserError(f"run_dir: {folder} already holds a run; continue it with --resume {folder} or choose another")
    run = Run(config)
    run.folder = folder
    console = Console()
    if dry_run:
        if run.main:
            console.print(describe(run), soft_wrap=True, highlight=False, markup=False)
        return
    try:
        prepare_direction(config, folder, run.policy, run.scorer.rewards, run.spec, run.accelerator)
        if run.main:
            _lead(run, console, resume is not None)
        else:
            if resume is not None:
                run.restore()
            run.check_agreement()
            _epochs(run, None, None)
    finally:
        run.close()


def _holds_a_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() or any((folder / "checkpoints").glob("*step-*"))


def _lead(run: Run, console: Console, resumed: bool) -> None:
    config = run.config
    run.folder.mkdir(parents=True, exist_ok=True)
    configs.dump(config, run.folder / "config.yaml")  # on a resume too: it may have more epochs
    record_environment(run.folder, device=str(run.policy.device), processes=run.accelerator.num_processes)
    if resumed:
        run.restore()
    run.check_agreement()
    tracking = config.tracking
    tracker = Tracker(run.folder, tracking.wandb, tracking.tensorboard, config.resolved())
    names = list(config.rewards)
    lower = lower_is_better(config.resolved())
    try:
        console.print(describe(run), soft_wrap=True, highlight=False, markup=False)
        past = read_metrics(run.folder)
        title = str(run.folder)
        with ProgressTable(config.epochs, names, title=title, console=console, history=past, lower=lower) as table:
            run.loop.status = table.status
            _epochs(run, tracker, table)
    finally:
        tracker.close()
        history = read_metrics(run.folder)
        if history:
            write_report(run.folder)
    judged = [metrics for metrics in history if "eval/diversity" in metrics]
    report = (run.folder / "report.html").resolve()
    if judged:
        console.print(summary(judged[0], judged[-1], trained=names, lower=lower))
        console.print(
            f"Open {report}", soft_wrap=True, highlight=False, markup=False
        )  # a path broken in two is no path


def _epochs(run: Run, tracker: Tracker | None, table: ProgressTable | None) -> None:
    config = run.config
    if run.epoch == 0:
        _baseline(run, tracker, table)
    while run.epoch < config.epochs:
        epoch = run.epoch + 1  # epochs are counted from 1; line 0 is the model before training
        metrics = run.loop.run_epoch(run.epoch) | direction_metrics(run.scorer.rewards)
        metrics["epoch"] = epoch
        run.epoch = epoch
        last = epoch == config.epochs
        if epoch % config.evaluate.every == 0 or last:
            _evaluate(run, metrics, tracker)
        # The line first, then the checkpoint: killed in between, the epoch is trained again and its line is kept.
        if tracker is not None and table is not None:
            tracker.log(metrics)
            table.add(metrics)
        if epoch % config.checkpoint.every == 0 or last:
            run.save()
        if tracker is not None and "eval/diversity" in metrics:
            write_report(run.folder)


def _baseline(run: Run, tracker: Tracker | None, table: ProgressTable | None) -> None:
    """Line 0 of the metrics: the model before training."""
    metrics: dict[str, Any] = {"epoch": 0, "step": 0, "samples": 0}
    _evaluate(run, metrics, tracker)
    if tracker is not None and table is not None:
        tracker.log(metrics)
        table.add(metrics)


def _evaluate(run: Run, metrics: dict[str, Any], tracker: Tracker | None) -> None:
    mark = time.perf_counter()
    run.loop.status("evaluating")
    metrics |= run.evaluate()
    run.draw_samples(metrics["epoch"], tracker)
    metrics["seconds/evaluate"] = round(time.perf_counter() - mark, 4)
    run.loop.clock.take()  # evaluation's forwards are not the next epoch's


def _time_calls(policy: Policy, clock: Clock) -> None:
    """Add the seconds of the policy's forwards and decodes to the clock."""

    def timed(function: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            mark = time.perf_counter()
            result = function(*args, **kwargs)
            clock.add(name, mark)
            return result

        return call

    policy.predict = timed(policy.predict, "forward")  # type: ignore[method-assign]
    policy.decode = timed(policy.decode, "decode")  # type: ignore[method-assign]


def describe(run: Run) -> str:
    """One paragraph that says what is about to happen."""
    config, policy = run.config, run.policy
    parameters = sum(p.numel() for _, p in policy.trainable)
    images = config.rollout.groups * config.rollout.group_size
    rewards = ", ".join(f"{n} x {config.rewards[n].weight:g}" for n in config.rewards)
    return (
        f"{config.objective} on {config.model}: {config.epochs} epochs of {images} images "
        f"({config.rollout.groups} prompts x {config.rollout.group_size}), {run.spec.steps} steps of {run.spec.name}; "
        f"{images // config.optimise.batch_size * config.optimise.inner_epochs} optimiser steps an epoch; LoRA rank "
        f"{config.lora.rank}, {parameters:,} parameters; rewards: {rewards}; "
        f"{run.accelerator.num_processes} process(es) on {policy.device}; run folder {run.folder}"
    )
