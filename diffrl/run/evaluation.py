"""The evaluations of a run: held-out scores, the fixed sample images, the guard rails, DivGenBench's small version."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from diffrl.config import Config
from diffrl.divgen.diversity import Features
from diffrl.divgen.prompts import world_of
from diffrl.divgen.run import SmallBenchmark
from diffrl.evaluation import Evaluated, score_policy, summarise
from diffrl.policy import Policy
from diffrl.policy.resizing import drawing_at, resized
from diffrl.prompts import load_prompts
from diffrl.records.held_out import HeldOut
from diffrl.records.verdict import Guard
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec
from diffrl.run.folder import RunFolder
from diffrl.run.journal import Journal
from diffrl.run.parts import evaluation_spec
from diffrl.run.students import Student


class Evaluation:
    """Everything with fixed seeds, of `snapshot`: the averaged LoRA, or the trained one without an average."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        snapshot: str,
        judges: Scorer,
        features: Features,
        students: Sequence[Student],
        guard: Guard,
        folder: RunFolder,
        accelerator: Accelerator,
    ) -> None:
        self.config, self.policy, self.snapshot, self.judges = config, policy, snapshot, judges
        self.features, self.students, self.guard = features, students, guard
        self.folder, self.accelerator = folder, accelerator
        self.prompts = load_prompts(config.prompts.test)[: config.evaluate.prompts]
        self.backbone = resized(policy.backbone, config.evaluate.resolution, "evaluate.resolution")
        self.divgen: SmallBenchmark | None = None
        if config.evaluate.divgen:
            self.divgen = SmallBenchmark(world_of(config.model), config.evaluate.per_prompt, accelerator.device)
        self.past: list[dict[str, Any]] = []  # what was measured so far, the first one before training
        self.held = HeldOut()  # of each prompt
        self._prompts: dict[str, list[float | None]] = {}  # of the newest evaluation
        self._samples = torch.empty(0), torch.empty(0)  # images and their scores, of the newest evaluation
        self.check: Callable[[], None] = lambda: None  # may raise, between batches

    def measure(
        self, metrics: dict[str, Any], journal: Journal, evaluated: bool = True, divgen: bool = False
    ) -> list[str]:
        """Evaluate, and measure DivGenBench's small version, into `metrics`; returns the guard rails' alarms."""
        alarms: list[str] = []
        mark = time.perf_counter()
        if evaluated:
            journal.status("evaluating")
            metrics |= self.scores()
            self._show_samples(metrics["epoch"], journal)
            alarms = self._look_out(metrics)
        if divgen:
            journal.status("evaluating, DivGenBench")
            metrics |= self.small_benchmark()
        if evaluated or divgen:
            metrics["seconds/evaluate"] = round(time.perf_counter() - mark, 4)
            if (copying := self.judges.take_copying()) is not None:
                metrics["seconds/offload"] = round(metrics.get("seconds/offload", 0.0) + copying, 4)
        return alarms

    def scores(self) -> dict[str, Any]:
        """Held-out scores on the model, and on its students as `eval/STUDENT/...`; those of each prompt are kept."""
        keep = self.config.tracking.samples
        with drawing_at(self.policy, self.backbone):
            found = self._judge(self.policy, evaluation_spec(self.config), self.snapshot, keep)
        self._samples = found.pictures, found.scores[:: self.config.evaluate.per_prompt][: len(found.pictures)]
        each = partial(Evaluated.by_prompt, names=self.judges.names, per_prompt=self.config.evaluate.per_prompt)
        self._prompts = each(found)
        means = summarise(self.judges.names, found.scores) | found.breadth()
        spread = float(found.saturation.std(correction=0))
        means |= {"saturation": float(found.saturation.mean()), "saturation/std": spread}
        for student in self.students:
            with student.wearing(self.policy.state(self.snapshot)) as policy:
                found = self._judge(policy, student.spec, "default")
            values = summarise(self.judges.names, found.scores) | found.breadth()
            means |= {f"{student.name}/{name}": value for name, value in values.items()}
            self._prompts |= {f"{student.name}/{name}": column for name, column in each(found).items()}
        return {f"eval/{name}": value for name, value in means.items()}

    def _judge(self, policy: Policy, spec: SamplerSpec, snapshot: str, keep: int = 0) -> Evaluated:
        """The held-out prompts' images of a model, scored; every process draws its share."""
        return score_policy(
            policy,
            self.judges,
            self.features,
            self.prompts,
            spec,
            seed=self.config.seed,
            per_prompt=self.config.evaluate.per_prompt,
            batch_size=self.config.rollout.batch_size,
            accelerator=self.accelerator,
            snapshot=snapshot,
            check=self.check,
            keep=keep,
        )

    def _look_out(self, metrics: dict[str, Any]) -> list[str]:
        """The guard rails' alarms for an evaluation's metrics, into which they are written.

        Without any the LoRA is marked as healthy: `RUN_DIR/healthy` has the last such one for diffusers to load.
        """
        self.past.append(dict(metrics))
        self.held.add(metrics["epoch"], self._prompts)
        self.folder.save_held_out(self.held, metrics["epoch"])
        alarms = self.guard.alarms(self.past, self.held)
        for alarm in alarms:
            metrics[f"alarm/{alarm.key}"] = alarm.text
        if metrics["epoch"] and not alarms:
            self.folder.save_healthy(self.policy, self.snapshot, metrics)
        return [alarm.text for alarm in alarms]

    def small_benchmark(self) -> dict[str, Any]:
        """DivGenBench's small version."""
        assert self.divgen is not None
        with drawing_at(self.policy, self.backbone):
            return self.divgen.measure(
                self.policy,
                evaluation_spec(self.config),
                seed=self.config.seed,
                batch_size=self.config.rollout.batch_size,
                accelerator=self.accelerator,
                snapshot=self.snapshot,
            )

    def _show_samples(self, epoch: int, journal: Journal) -> None:
        """The newest evaluation's first image of each of the first prompts, as PNG and to the trackers."""
        images, scores = self._samples
        if len(images) and self.accelerator.is_main_process:
            texts = [prompt.text for prompt in self.prompts[: len(images)]]
            rows = [dict(zip(self.judges.names, row, strict=True)) for row in scores.tolist()]
            paths = self.folder.save_samples(epoch, images, texts, self.config.seed, rows)
            journal.images(epoch, paths, texts)
