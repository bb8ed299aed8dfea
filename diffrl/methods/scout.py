"""Scouting (Sol-RL, arXiv 2604.06916): an epoch's images are the extremes of many that were drawn in few steps.

Of each prompt N candidates are drawn by a deterministic sampler in S' steps and scored. The best and the worst, G in
all, are drawn again from the same noise in S steps: they are what a rollout without scouts makes of these members.
Their new scores train; the candidates' are forgotten.

symbol   name here         meaning
r        correlation       of the G images' scores as scouts and as images, within a prompt
V        spread            variance of the chosen scouts' scores over that of all N, within a prompt
c        cost              forwards of an epoch over those without scouts; a trained row counts three

For Gaussian scores those of the chosen images spread 1 / sqrt(1 - r^2 (1 - 1/V)) times as wide as an unchosen group's,
and the gradient with them. The same forwards without scouts train c times as many prompts, whose mean has 1 / sqrt(c)
of the noise. So scouting pays where r^2 > (1 - 1/c) / (1 - 1/V): `break_even`, which is ours, not the paper's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.advantages import weighted_sum
from diffrl.objectives.advantages import ScoredBatch
from diffrl.prompts import MixedStream, Prompt, PromptStream
from diffrl.rewards.compose import ScoreTransform
from diffrl.rollout import Rollout, generate
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook
from diffrl.run.source import Epoch, Rollouts
from diffrl.stats import rank_correlation

EPOCHS = 5  # over which the rank correlation is averaged before it is called too low


def extremes(scores: Tensor, keep: int) -> Tensor:
    """(P, keep) numbers, rising, of the best and the worst of scores (P, N); of an odd number one more is best.

    Of equal ones the first are better; what has no score (NaN) is between.
    """
    known = ~scores.isnan()
    middle = torch.where(known, scores, 0.0).sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp_min(1)
    order = torch.where(known, scores, middle).argsort(dim=1, descending=True, stable=True)
    worst = keep // 2
    best = order[:, : keep - worst]
    return torch.cat([best, order[:, order.shape[1] - worst :]], dim=1).sort(dim=1).values


def spread(scores: Tensor, chosen: Tensor) -> float:
    """V of scores (P, N) and the chosen numbers (P, G); 1 where there is no spread."""
    known = scores[~scores.isnan().any(1)]
    mine = scores.gather(1, chosen)[~scores.isnan().any(1)]
    every = float(known.double().var(1).sum())
    return float(mine.double().var(1).sum()) / every if every else 1.0


def break_even(cost: float, spread: float) -> float:
    """The correlation from which on scouting pays; 1 where no correlation is enough."""
    return ((1 - 1 / cost) / (1 - 1 / spread)) ** 0.5 if spread > cost else 1.0


class CandidateSelection(RunHook):
    """A source: of an epoch's prompts the members that scouts choose.

    Args:
        rollouts: draws the images.
        compose, weights: make the total of the rewards by which candidates are ordered.
        candidates, steps: N and S'.
        cost: c.
    """

    def __init__(
        self, rollouts: Rollouts, compose: ScoreTransform, weights: Tensor, candidates: int, steps: int, cost: float
    ) -> None:
        self.rollouts, self.compose, self.weights = rollouts, compose, weights
        self.candidates, self.steps, self.cost = candidates, steps, cost
        self._chosen: Tensor | None = None  # (P, G) scores of the chosen as scouts
        self._spread = 1.0
        self._recent: list[tuple[float, float]] = []
        self._warned = False

    @property
    def stream(self) -> PromptStream | MixedStream:
        return self.rollouts.stream

    def __call__(self, epoch: int) -> Epoch:
        prompts = self.rollouts.prompts(epoch)
        local = self._scores(prompts, epoch)
        drawn = self.rollouts.draw(prompts, epoch, self._members(local, len(prompts)))
        drawn.rollout.forwards += len(local) * self.steps
        return drawn

    def _members(self, local: Tensor, prompts: int) -> Tensor:
        """(P, G) members to draw, the same on every process, by this process's candidates' plain scores (n, C)."""
        everything = self.rollouts.processes.gather(local)
        groups = torch.arange(len(everything)) // self.candidates
        compose = copy.deepcopy(self.compose)  # what it remembers is of images that are trained on
        composed = compose(everything, groups)[:, : len(self.weights)]
        table = weighted_sum(composed, self.weights).view(prompts, self.candidates)
        members = extremes(table, self.rollouts.group_size)
        self._chosen, self._spread = table.gather(1, members), spread(table, members)
        return members

    def _scores(self, prompts: list[Prompt], epoch: int) -> Tensor:
        """(n, C) plain scores of this process's candidates, whose images are not kept."""
        rollouts, pending = self.rollouts, list[Any]()
        with rollouts.policy.uneven_forwards():
            for indices, images in generate(
                rollouts.policy,
                prompts,
                rollouts.spec.model_copy(update={"steps": self.steps}),
                seed=rollouts.seed,
                epoch=epoch,
                per_prompt=self.candidates,
                batch_size=rollouts.batch_size,
                rank=rollouts.processes.rank,
                world=rollouts.processes.count,
                snapshot=rollouts.objective.samples_from,
            ):
                rollouts.submit(images, [prompts[i // self.candidates] for i in indices.tolist()], pending)
                rollouts.monitor.status(f"scouting {int(indices[-1]) + 1}/{len(prompts) * self.candidates}")
                rollouts.monitor.check()
        return torch.cat([scores.result() for scores in pending])

    def after_rollout(self, epoch: int, rollout: Rollout, scored: ScoredBatch) -> Mapping[str, float | None]:
        return self.metrics(weighted_sum(scored.scores, self.weights)[:, 0])

    def metrics(self, totals: Tensor) -> dict[str, float | None]:
        """Of the images' scores (N,), in global order, against those that they had as scouts."""
        assert self._chosen is not None, "an epoch is drawn before it is judged"
        correlation = rank_correlation(self._chosen, totals.view_as(self._chosen))
        least = break_even(self.cost, self._spread)
        if correlation is not None:
            self._recent = [*self._recent, (correlation, least)][-EPOCHS:]
        return {"scout/rank_correlation": correlation, "scout/break_even": least, "scout/spread": self._spread}

    def after_epoch(self, metrics: dict[str, Any]) -> Sequence[str]:
        return [text] if (text := self.warning()) is not None else []

    def warning(self) -> str | None:
        """Said once: scouts have told too little of their images over the last epochs."""
        if self._warned or len(self._recent) < EPOCHS:
            return None
        mean, least = (sum(values) / EPOCHS for values in zip(*self._recent, strict=True))
        if mean >= least:
            return None
        self._warned = True
        hint = "more rollout.scout.steps, or no scouts" if least < 1 else "fewer rollout.scout.images or steps"
        return (
            f"WARNING: scouts say too little of their images: rank correlation {mean:.2f} over {EPOCHS} epochs, and at "
            f"this cost it pays from {least:.2f} on; as many forwards would do more for more prompts: {hint}"
        )


def add_scouting(build: Build) -> None:
    """`rollout.scout`: scouts choose what the rollout draws."""
    config, rollout, scout = build.config, build.config.rollout, build.config.rollout.scout
    assert scout is not None, "it is on"
    trained = 3 * config.objective_section.trained_steps(rollout) * config.optimise.inner_epochs
    cost = 1 + scout.images * scout.steps / (rollout.group_size * (rollout.steps + trained))
    build.add(CandidateSelection(build.rollouts, build.compose, build.weights, scout.images, scout.steps, cost))
