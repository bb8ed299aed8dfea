"""The evaluations of a run: held-out scores, the fixed sample images, and what hooks measure and judge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator

from diffrl.config import Config
from diffrl.evaluation import Evaluated, Evaluator, summarise, together
from diffrl.features import Features
from diffrl.policy import Policy
from diffrl.prompts import load_prompts
from diffrl.records.held_out import PROMPTS, SOLVER, HeldOut
from diffrl.records.tracking import save_samples
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import Measured, Monitor, RunHook
from diffrl.run.identity import digest


def evaluation_spec(config: Config) -> SamplerSpec:
    """Evaluation is deterministic: DPM-Solver++ for flow models, DDIM without noise for DDPM-type ones.

    Few-step models (`renoise`) make their images by their own step: an ODE solver is not what they were distilled for.
    """
    rollout = config.rollout
    steps = config.evaluate.steps or rollout.steps
    same: dict[str, Any] = {"guidance_scale": rollout.guidance_scale, "shift": rollout.shift}
    if rollout.sampler == "renoise":
        return SamplerSpec(sampler="renoise", steps=max(steps, 2), noise_level=rollout.noise, **same)
    name = "ddim" if rollout.sampler == "ddim" else "dpm2"
    return SamplerSpec(sampler=name, steps=steps, noise_level=0.0, **same)


class Evaluation:
    """Everything with fixed seeds, of `snapshot`: the averaged LoRA, or the trained one without an average."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        snapshot: str,
        judges: Scorer,
        features: Features,
        folder: RunFolder,
        accelerator: Accelerator,
        monitor: Monitor,
        hooks: Sequence[RunHook] = (),
    ) -> None:
        self.config, self.policy, self.snapshot, self.judges = config, policy, snapshot, judges
        self.features, self.hooks, self.folder = features, hooks, folder
        self.accelerator, self.monitor = accelerator, monitor
        self.prompts = load_prompts(config.prompts.test)[: config.evaluate.prompts]
        self.backbone: Any = None  # of another size
        if (resolution := config.evaluate.resolution) is not None:
            from diffrl.policy.resizing import resized

            self.backbone = resized(policy.backbone, resolution, "evaluate.resolution")
        self.past: list[dict[str, Any]] = []  # what was measured so far, the first one before training
        self.held = HeldOut()  # of each prompt
        self.code: dict[str, str] = {}  # of the judges, as digests
        self._prompts: dict[str, list[float | None]] = {}  # of the newest evaluation
        self._samples = torch.empty(0), torch.empty(0)  # images and their scores, of the newest evaluation

    @property
    def facts(self) -> dict[str, str]:
        """Digests of what evaluations draw, and of each judge: values can be compared where these are the same."""
        spec, evaluate = evaluation_spec(self.config), self.config.evaluate
        solver = [evaluate.resolution, spec.sampler, spec.steps, spec.noise_level, spec.guidance_scale, spec.shift]
        drawn = {PROMPTS: [evaluate.per_prompt, *(prompt.text for prompt in self.prompts)], SOLVER: solver}
        return {key: digest(what) for key, what in drawn.items()} | self.code

    def measure(self, metrics: dict[str, Any], evaluated: bool = True) -> list[str]:
        """Evaluate, if the epoch is `evaluated`, and let hooks measure, into `metrics`; their alarms."""
        alarms: list[str] = []
        mark = time.perf_counter()
        if evaluated:
            self.monitor.status("evaluating")
            metrics |= self.scores()
        added = self.added(metrics["epoch"], evaluated)
        for found in added:
            metrics |= found.metrics
            self._prompts |= found.prompts
        if evaluated:
            self._show_samples(metrics["epoch"])
            alarms = self._judged(metrics)
        if evaluated or added:
            metrics["seconds/evaluate"] = round(time.perf_counter() - mark, 4)
            if (copying := self.judges.take_copying()) is not None:
                metrics["seconds/offload"] = round(metrics.get("seconds/offload", 0.0) + copying, 4)
        return alarms

    def added(self, epoch: int, evaluated: bool) -> list[Measured]:
        """What the hooks measure after this epoch."""
        return [found for hook in self.hooks if (found := hook.on_evaluate(epoch, evaluated)) is not None]

    def scores(self) -> dict[str, Any]:
        """Held-out scores of the model as `eval/...`; those of each prompt are kept."""
        with self._drawing():
            found = self.judge(self.policy, evaluation_spec(self.config), self.snapshot, self.config.tracking.samples)
        self._samples = found.pictures, found.scores[:: self.config.evaluate.per_prompt][: len(found.pictures)]
        measured = self.measured(found)
        self._prompts = dict(measured.prompts)
        spread = float(found.saturation.std(correction=0))
        saturation = {"eval/saturation": float(found.saturation.mean()), "eval/saturation/std": spread}
        missing = self.judges.unscored.take(lambda rows: together(rows, self.accelerator), "unscored/eval/")
        return {**measured.metrics, **saturation, **missing}

    def _drawing(self) -> AbstractContextManager[None]:
        """Inside, the policy draws at the evaluations' size."""
        if self.backbone is None:
            return nullcontext()
        from diffrl.policy.resizing import drawing_at

        return drawing_at(self.policy, self.backbone)

    def measured(self, found: Evaluated, prefix: str = "") -> Measured:
        """The means of what was judged, and the means of each prompt; `prefix`: before all names."""
        means = summarise(self.judges.names, found.scores) | found.breadth()
        columns = found.by_prompt(self.judges.names, self.config.evaluate.per_prompt)
        return Measured(
            {f"eval/{prefix}{name}": value for name, value in means.items()},
            {f"{prefix}{name}": column for name, column in columns.items()},
        )

    def judge(self, policy: Policy, spec: SamplerSpec, snapshot: str, keep: int = 0) -> Evaluated:
        """The held-out prompts' images of a model, scored; every process draws its share."""
        evaluate, batch_size = self.config.evaluate, self.config.rollout.batch_size
        amount = evaluate.per_prompt, batch_size, self.accelerator, self.monitor.check
        evaluator = Evaluator(policy, self.judges, self.features, spec, *amount)
        return evaluator.score(self.prompts, snapshot, self.config.seed, keep=keep)

    def _judged(self, metrics: dict[str, Any]) -> list[str]:
        """Keep an evaluation's metrics, and let hooks judge it and all before it; their alarms."""
        self.past.append(dict(metrics))
        self.held.add(metrics["epoch"], self._prompts)
        self.folder.save_held_out(self.held, metrics["epoch"])
        return [text for hook in self.hooks for text in hook.alarms(metrics)]

    def _show_samples(self, epoch: int) -> None:
        """The newest evaluation's first image of each of the first prompts, as PNG."""
        images, scores = self._samples
        if len(images) and self.accelerator.is_main_process:
            texts = [prompt.text for prompt in self.prompts[: len(images)]]
            rows = [dict(zip(self.judges.names, row, strict=True)) for row in scores.tolist()]
            paths = save_samples(self.folder.path, epoch, images, texts, [self.config.seed] * len(texts), rows)
            for hook in self.hooks:
                hook.on_samples(epoch, paths, texts)
