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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffrl.advantages import weighted_sum
from diffrl.prompts import Prompt
from diffrl.rollout import generate
from diffrl.run.images import submit
from diffrl.stats import rank_correlation

if TYPE_CHECKING:
    from diffrl.run.loop import Loop

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


class Scouting:
    """Chooses an epoch's members.

    Args:
        candidates, steps: N and S'.
        cost: c.
    """

    def __init__(self, candidates: int, steps: int, cost: float) -> None:
        self.candidates, self.steps, self.cost = candidates, steps, cost
        self.forwards = 0  # of the last epoch's scouts on this process
        self._chosen: Tensor | None = None  # (P, G) scores of the chosen as scouts
        self._spread = 1.0
        self._recent: list[tuple[float, float]] = []
        self._warned = False

    def members(self, loop: Loop, prompts: list[Prompt], epoch: int, group: int) -> Tensor:
        """(P, G) members to draw, the same on every process; exchanges scores between them."""
        local = self._scores(loop, prompts, epoch)
        self.forwards = len(local) * self.steps
        everything = loop.processes.gather(local)
        groups = torch.arange(len(everything)) // self.candidates
        compose = copy.deepcopy(loop.compose)  # what it remembers is of images that are trained on
        composed = compose(everything, groups)[:, : len(loop.weights)]
        table = weighted_sum(composed, loop.weights).view(len(prompts), self.candidates)
        members = extremes(table, group)
        self._chosen, self._spread = table.gather(1, members), spread(table, members)
        return members

    def _scores(self, loop: Loop, prompts: list[Prompt], epoch: int) -> Tensor:
        """(n, C) plain scores of this process's candidates, whose images are not kept."""
        pending: list[Any] = []
        with loop.policy.together():
            for indices, images in generate(
                loop.policy,
                prompts,
                loop.spec.model_copy(update={"steps": self.steps}),
                seed=loop.settings.seed,
                epoch=epoch,
                per_prompt=self.candidates,
                batch_size=loop.settings.rollout_batch,
                rank=loop.processes.rank,
                world=loop.processes.count,
                snapshot=loop.objective.samples_from,
            ):
                submit(loop, images, [prompts[i // self.candidates] for i in indices.tolist()], pending)
                loop.status(f"scouting {int(indices[-1]) + 1}/{len(prompts) * self.candidates}")
                loop.check()
        return torch.cat([scores.result() for scores in pending])

    def metrics(self, totals: Tensor) -> dict[str, float | None]:
        """Of the images' scores (N,), in global order, against those that they had as scouts."""
        assert self._chosen is not None, "members() runs before metrics()"
        correlation = rank_correlation(self._chosen, totals.view_as(self._chosen))
        least = break_even(self.cost, self._spread)
        if correlation is not None:
            self._recent = [*self._recent, (correlation, least)][-EPOCHS:]
        return {"scout/rank_correlation": correlation, "scout/break_even": least, "scout/spread": self._spread}

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
