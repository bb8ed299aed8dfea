"""The only training loop: roll out, score, turn scores into advantages, optimise, follow.

It is the same for every method; what differs is behind the seams of `diffrl.objectives.objective`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import TrainingError
from diffrl.features import group_diversity
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.gradients import Gradients, SumOfLosses
from diffrl.objectives.minibatches import holds_groups, optimiser_steps, part_sizes, sample_pairs
from diffrl.objectives.objective import Objective, OptimiserStep, RunningMeans
from diffrl.objectives.rows import Rows
from diffrl.objectives.running_stats import summaries
from diffrl.policy import Policy
from diffrl.records.progress import PHASES
from diffrl.rewards.compose import ScoreTransform
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import Rollout
from diffrl.run.clock import by_process, now, split_epoch
from diffrl.run.hooks import Monitor, RunHook
from diffrl.run.processes import Processes
from diffrl.run.rate import LearningRate
from diffrl.run.source import Epoch, EpochSource
from diffrl.seeds import seed_of

MAX_SKIPPED = 2  # optimiser steps in a row that may be skipped for a non-finite gradient


@dataclass(frozen=True)
class LoopSettings:
    """Numbers of the loop; all counts are over all processes unless said otherwise."""

    seed: int
    group_size: int
    batch_size: int  # images per optimiser step
    inner_epochs: int
    max_grad_norm: float
    ema: float  # 0: none
    ema_every: int = 1
    ema_warmup: bool = False
    micro_batch: float | None = None  # rows of one at most, or a share of a process's in an optimiser step; None: all
    rate: LearningRate = field(default_factory=LearningRate)  # constant: as the optimiser was made with


def ema_decay(settings: LoopSettings, step: int) -> float | None:
    """How far the averaged LoRA stays where it is after optimiser step `step` (from 1): 1 wholly; None: no update.

    With warm-up the decay is at most (1 + step) / (10 + step), as in the released code of Flow-GRPO and DiffusionNFT,
    so that the average does not hold on to the untrained LoRA.
    """
    if not settings.ema or step % settings.ema_every:
        return None
    return min(settings.ema, (1 + step) / (10 + step)) if settings.ema_warmup else settings.ema


class Loop:
    """One epoch at a time; everything that shapes the next epoch is in `state_dict` and the policy's snapshots."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        scorer: Scorer,
        weights: Tensor,
        source: EpochSource,
        settings: LoopSettings,
        optimiser: torch.optim.Optimizer,
        processes: Processes,
        *,
        hooks: Sequence[RunHook] = (),
        monitor: Monitor | None = None,
        gradients: Gradients | None = None,
        compose: ScoreTransform | None = None,
        fp16: bool = False,
    ) -> None:
        self.policy, self.objective, self.scorer, self.weights = policy, objective, scorer, weights
        self.source, self.settings, self.optimiser = source, settings, optimiser
        self.processes, self.clock = processes, processes.clock
        self.hooks, self.monitor = hooks, monitor or Monitor()
        self.parameters = [parameter for _, parameter in policy.trainable]
        self.scaler = torch.amp.GradScaler(policy.device.type, enabled=fp16)
        self.gradients: Gradients = gradients or SumOfLosses()
        self.compose = compose or ScoreTransform(scorer.names, {})  # of all images, before the advantages
        self.step = 0
        self.skipped = 0  # optimiser steps so far that were left out for a non-finite gradient
        self._in_a_row = 0  # of them, those since the last one that was taken

    def run_epoch(self, epoch: int) -> dict[str, Any]:
        """Train one epoch; returns its line of `metrics.jsonl` (without evaluation)."""
        self.clock.take()  # a calibration's forwards are not the epoch's
        started = mark = time.perf_counter()
        drawn = self.source(epoch)
        rollout, mark = drawn.rollout, self._phase("rollout", mark)
        scored, scores, local = self._judged(drawn)
        added: dict[str, Any] = self.scorer.unscored.take(lambda rows: self.processes.gather(rows[None]).sum(0))
        for hook in self.hooks:
            added |= hook.after_rollout(epoch, rollout, scored)
        mark = self._phase("advantages", mark)
        with self.processes.together():
            losses, norms = self._optimise(rollout, local, epoch)
        self._phase("optimise", mark)
        self.objective.after_epoch(self.policy, self.step)
        metrics = self._metrics(epoch, scores, losses, norms)
        known = ~scored.features.isnan().any(1)  # images that were not drawn have none
        diversity = group_diversity(scored.features[known], scored.groups[known]) if known.any() else None
        metrics["diversity"] = None if diversity is None else float(diversity)
        metrics["samples"] = (epoch + 1) * rollout.total
        metrics["rollout/forwards"] = int(self.processes.sum(torch.tensor(rollout.forwards, device=self.policy.device)))
        if self.objective.credit is not None:
            metrics |= {f"rollout/level/{i}": level for i, level in enumerate(rollout.spec.noise_levels or ())}
        metrics |= added | {f"batch/{name}": figure for name, figure in self.scorer.figures.items()}
        metrics |= self._seconds(started)
        if (copying := self.scorer.take_copying()) is not None:
            metrics["seconds/offload"] = round(copying, 4)
        return metrics

    def warm_up(self, drawn: Epoch, key: str) -> None:
        """The objective learns from images that nothing else is trained on, drawn under `key`."""
        _, _, advantages = self._judged(drawn)
        for samples in self._steps(drawn.rollout, key):
            parts, _, _ = self._parts(drawn.rollout, advantages, samples, 0)
            step = OptimiserStep(drawn.rollout, advantages, parts, (self.settings.seed, key), self.processes.sum)
            self.objective.learn(self.policy, step)

    def _steps(self, rollout: Rollout, *key: int | str) -> list[Tensor]:
        """Which samples of this process belong to each optimiser step over a rollout; `key` seeds the order."""
        settings, order = self.settings, seed_of(self.settings.seed, *key, "steps")
        unit = settings.group_size if self.objective.whole_groups else 1
        count = len(rollout.member)
        return optimiser_steps(rollout.total, settings.batch_size, rollout.first, count, order, unit)

    def _judged(self, drawn: Epoch) -> tuple[ScoredBatch, Tensor, Tensor]:
        """What the advantages were made of, the final views' plain scores (N, C), both over all processes, and the
        advantages of this one's samples."""
        rollout, scores, features = drawn
        views = scores.shape[1] if scores.ndim == 3 else 1
        everything = self.processes.gather(torch.cat([scores.flatten(1), features], dim=1))
        columns = everything.shape[1] - features.shape[1]
        views_of, features = everything[:, :columns].unflatten(1, (views, -1)), everything[:, columns:]
        scored, plain = self._composed(rollout, views_of, features)
        advantages = self.objective.shaped(scored)
        return scored, plain, advantages[rollout.first : rollout.first + len(rollout.member)]

    def _composed(self, rollout: Rollout, views: Tensor, features: Tensor) -> tuple[ScoredBatch, Tensor]:
        """What the advantages are made of, and the plain scores (N, C) of the final views, from those of all views
        (N, V, C): a composition that compares compares the images of one view."""
        count, rewards = views.shape[1], len(self.weights)  # what the scorer has behind them is not optimised
        groups, size = torch.arange(rollout.total) // self.settings.group_size, self.settings.group_size
        own = groups[:, None] * count + torch.arange(count)
        composed = self.compose(views.flatten(0, 1), own.flatten()).unflatten(0, views.shape[:2])
        final = 0 if (credit := self.objective.credit) is None else credit.plan(rollout.spec).final(rollout.spec)
        scores, auxiliary = composed[:, final, :rewards], composed[:, final, rewards:]
        kept = composed[..., :rewards] if count > 1 else None
        names = [(rollout.seed, rollout.epoch, one.text, i) for one in rollout.prompts for i in range(size)]
        return ScoredBatch(scores, self.weights, groups, features, auxiliary, kept, names), views[:, final]

    def _phase(self, name: str, mark: float) -> float:
        return self.clock.lap(name, mark, now(self.policy.device))

    def _optimise(self, rollout: Rollout, advantages: Tensor, epoch: int) -> tuple[list[Tensor], list[Tensor]]:
        settings, objective = self.settings, self.objective
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        for inner in range(settings.inner_epochs):
            for samples in self._steps(rollout, epoch, inner):
                self.monitor.status(f"optimising, step {self.step + 1}")
                loss_of_step = torch.zeros((), device=self.policy.device)
                parts, idle, rows_of_step = self._parts(rollout, advantages, samples, epoch)
                key = (settings.seed, epoch, inner)
                step = OptimiserStep(rollout, advantages, parts, key, self.processes.sum)
                objective.before_step(self.policy, step)
                for penalty in objective.penalties:
                    penalty.before_step(self.policy, step)
                for part in parts:
                    if not len(part):  # fewer rows than micro-batches were trained
                        continue
                    rows = objective.batch(rollout, advantages, part, key)
                    mark, forward = time.perf_counter(), self.clock.spent("forward", "decode")
                    loss_of_step += self.gradients.add(objective, self.policy, rows, rows_of_step, self.scaler)
                    # What is neither a forward nor a decoding in there is the loss and its backward.
                    self.clock.add("backward", mark + self.clock.spent("forward", "decode") - forward)
                    self.monitor.check()
                for _ in range(idle):
                    self._keep_step(objective.batch(rollout, advantages, sample_pairs(samples[:1], 1), key))
                norm = self._step()
                if norm is None:
                    self._skip(rollout, samples, loss_of_step, epoch)
                    continue
                self._in_a_row = 0
                norms.append(norm)
                losses.append(loss_of_step)
        return losses, norms

    def _parts(
        self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int
    ) -> tuple[Sequence[Tensor], int, int]:
        """An optimiser step's micro-batches here, how many more only keep step, and how many rows its mean is over, on
        all processes."""
        settings, objective = self.settings, self.objective
        limit = settings.micro_batch
        if not objective.selects:
            each = objective.rows_per_sample(rollout)
            here = settings.batch_size // self.processes.count
            together = holds_groups(here, settings.group_size, objective.whole_groups)
            pairs = sample_pairs(samples, each)
            return pairs.split(part_sizes(len(pairs), limit, together)), 0, settings.batch_size * each
        pairs = objective.pairs(rollout, advantages, samples, epoch)
        counts = self.processes.gather(torch.tensor([len(pairs)])).tolist()
        # A sharded network's passes are everybody's, so all have as many; else one is enough to have gradients at all.
        most = max(len(part_sizes(count, limit)) for count in counts) if self.policy.sharded else 1
        sizes = part_sizes(len(pairs), limit)  # selected rows lie as they come, so groups are cut
        return pairs.split(sizes), max(most - (len(sizes) if len(pairs) else 0), 0), max(sum(counts), 1)

    def _keep_step(self, rows: Rows) -> None:
        """Dummy forward and backward with zero weight, so that all FSDP ranks run the same number of passes."""
        rows.advantages = torch.zeros_like(rows.advantages)
        with RunningMeans.paused():
            self.gradients.add(self.objective, self.policy, rows, math.inf, self.scaler)

    def _step(self) -> Tensor | None:
        """Reduce the gradients over processes, clip, step, and let the average follow.

        Returns the gradient norm; None if it is not finite: then nothing was updated.
        """
        # Before unscaling: that looks for infinities, and every process must find the same ones.
        self.gradients.finish(self.parameters, self.processes.sum if self.processes.count > 1 else None)
        self.scaler.unscale_(self.optimiser)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        fp16 = self.scaler.is_enabled()
        if not fp16 and not math.isfinite(float(norm)):
            return None
        self.settings.rate.set(self.optimiser, self.step)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if fp16 and self.scaler.get_scale() < 1.0:
            raise TrainingError(
                f"optimiser step {self.step}: the gradients stay non-finite in fp16; resume from the last checkpoint "
                "with optimise.precision=bf16 or fp32"
            )
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.objective.after_step(self.policy, self.step)
        for penalty in self.objective.penalties:
            penalty.after_step(self.policy, self.step)
        if (decay := ema_decay(self.settings, self.step)) is not None:
            self.policy.ema_update("ema", decay)
        return norm.detach()

    def _skip(self, rollout: Rollout, samples: Tensor, loss: Tensor, epoch: int) -> None:
        """Leave out a step whose gradient is not finite; too many in a row end the run.

        Every process sees the same reduced gradient, so all of them skip.
        """
        self.skipped += 1
        self._in_a_row += 1
        broken = [name for name, p in self.policy.trainable if p.grad is not None and not p.grad.isfinite().all()]
        self.optimiser.zero_grad(set_to_none=True)
        if self._in_a_row <= MAX_SKIPPED:
            return
        times = "" if self._in_a_row == 1 else f", {self._in_a_row} times in a row"
        raise TrainingError(
            f"optimiser step {self.step}: the gradient is not finite{times}; nothing was updated. Resume from the last "
            "checkpoint with a lower optimise.learning_rate or optimise.precision=fp32",
            epoch=epoch + 1,
            step=self.step,
            in_a_row=self._in_a_row,
            loss=str(float(loss)),
            prompts=sorted({rollout.identity(int(i))[0] for i in samples}),
            gradients_not_finite=broken,
        )

    def _metrics(self, epoch: int, scores: Tensor, losses: list[Tensor], norms: list[Tensor]) -> dict[str, Any]:
        metrics: dict[str, Any] = {"epoch": epoch, "step": self.step}
        for index, name in enumerate(self.scorer.names):
            column = scores[:, index]
            known = column[~column.isnan()]
            kind = "reward" if index < len(self.weights) else "watch"
            metrics[f"{kind}/{name}"] = float(known.mean()) if len(known) else None
            metrics[f"{kind}/{name}/std"] = float(known.std(correction=0)) if len(known) else None
        total = torch.stack([*losses, torch.zeros((), device=self.policy.device)]).sum()
        sums = {"loss": torch.stack([total, total.new_tensor(len(losses))])} | self.objective.metrics()
        for penalty in self.objective.penalties:
            sums |= penalty.metrics()
        if self.processes.count > 1:
            packed = self.processes.accelerator.reduce(torch.cat(list(sums.values())), reduction="sum")
            sums = dict(zip(sums, packed.split([len(values) for values in sums.values()]), strict=True))
        # Losses are shares of a mean over all processes: their sum over processes counts each step once.
        sums["loss"][1] = len(losses)
        metrics |= summaries(sums)
        finite = [norm for norm in map(float, norms) if math.isfinite(norm)]  # fp16 skips steps that overflow
        metrics["grad_norm"] = sum(finite) / len(finite) if finite else None
        metrics["loss"] = metrics["loss"] if losses else None  # every step of the epoch was skipped
        if self.skipped:
            metrics["skipped"] = self.skipped
        return metrics | self.settings.rate.metrics(self.step) | self.gradients.metrics()

    def _seconds(self, started: float) -> dict[str, float]:
        """Where the epoch's seconds went, here and, with several processes, in each of them."""
        total, seconds = time.perf_counter() - started, self.clock.take()
        named = split_epoch(seconds, total, on_cpu=self.policy.device.type == "cpu")
        if self.processes.count > 1:
            mine = torch.tensor([[seconds.get(phase, 0.0) for phase in PHASES]], device=self.policy.device)
            named |= by_process(self.processes.gather(mine))
        return {name: round(value, 4) for name, value in named.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "skipped": [self.skipped, self._in_a_row],
            "objective": self.objective.state_dict(),
            "penalties": [penalty.state_dict() for penalty in self.objective.penalties],
            "gradients": self.gradients.state_dict(),
            "compose": self.compose.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.skipped, self._in_a_row = state["skipped"]
        self.objective.load_state_dict(state["objective"])
        for penalty, values in zip(self.objective.penalties, state["penalties"], strict=True):
            penalty.load_state_dict(values)
        self.gradients.load_state_dict(state["gradients"])
        self.compose.load_state_dict(state["compose"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
