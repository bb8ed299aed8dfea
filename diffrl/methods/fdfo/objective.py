"""FDFO: finite-difference flow optimisation (arXiv 2603.12893): the whole sampling is one action.

A group starts from one noise, and its paths part by a little fresh noise in each step. What its images differ in, and
by how much that was better, is a finite difference of the reward: velocities move along it in every state.

symbol     name here     meaning
dx         difference    an image less the mean of its group: of two, half their difference
A = dR     advantages    the same of the reward, raw: less the mean, divided by nothing
g          -             dx / mean dx^2: a velocity that is less by g makes the image more by dx's direction
u          move          v_theta - v_old, in a state of the path
r          exp(phi)      exp(p(v_theta) - p(v_old)), p(v) = -mean (v - (v_old - g))^2, means over dims

    log r = -mean (u^2 + 2 g u),      L = -A r + |A| / (2 eps) (r - 1)^2

On policy the gradient is 2 A mean(g grad v). L is least at r = 1 +- eps, for a move of eps / 2 of dx's size whatever
|A|: a trust region in units of dx. dx and A change sign together, so the two images of a pair say the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffrl.config.base import Section
from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.fdfo import FDFOSection
from diffrl.methods.shared.coupling import all_gather_rows
from diffrl.methods.shared.sections import COPY
from diffrl.objectives.objective import BuildContext, Cost, Objective, OptimiserStep
from diffrl.objectives.rows import Rows, row_advantages
from diffrl.policy import Policy
from diffrl.rollout import Rollout, SamplerSpec


def log_ratio(move: Tensor, difference: Tensor) -> Tensor:
    """log r (b,) of moves u and differences dx (b, C, h, w); 0 where an image differs in nothing from its group."""
    size = difference.square().flatten(1).mean(1)
    along = (difference * move).flatten(1).mean(1) / torch.where(size > 0, size, 1.0)
    return torch.where(size > 0, -move.square().flatten(1).mean(1) - 2 * along, 0.0)


def fdfo_loss(log_r: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """(b, K) losses of log r (b,) and A (b, K)."""
    r = log_r.exp()[:, None]
    return advantages.abs() / (2 * epsilon) * (r - 1).square() - advantages * r


class FDFO(Objective):
    """Rows are all states of the paths of all images. Rollouts come from theta."""

    keep_trajectory = "path"
    whole_groups = True

    def __init__(self, spec: SamplerSpec, keys: FDFOSection | None = None, **values: Any) -> None:
        keys = FDFOSection.of(keys, values)
        super().__init__(beta=keys.beta, advantage_std="none", decays={"old": COPY})
        self.epsilon, self.guidance_scale = keys.epsilon, spec.guidance_scale
        self._means: tuple[Rollout, int, Tensor] | None = None  # an epoch's, its first group here, (groups, C, h, w)

    @classmethod
    def of(cls, section: Section, given: BuildContext) -> FDFO:
        return cls(given.spec, section)  # type: ignore[arg-type]

    def rows_per_sample(self, rollout: Rollout) -> int:
        assert rollout.trajectory is not None, "FDFO needs the path's states"
        return rollout.trajectory.t.shape[1]

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        path, (sample, number) = rollout.trajectory, pairs.unbind(1)
        assert path is not None, "FDFO needs the path's states"
        i, j = (index.to(path.t.device, non_blocking=True) for index in (sample, number))
        return Rows(
            x0=rollout.latents[i],
            x_t=path.x[i, j],
            t=path.t[i, j],
            cond=rollout.cond.select(rollout.prompt_index[sample]),
            advantages=row_advantages(advantages, sample, number).to(path.t.device, non_blocking=True),
            groups=rollout.prompt_index[sample],
            pairs=pairs,
            on_policy=self.on_policy,
            guidance=self.guidance_scale,
        )

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        return Cost(forwards=1 - 1 / steps)  # old, but for the epoch's first step; it comes first

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        """The means of the epoch's groups, once; only groups that are split need other processes' images."""
        rollout, latents = step.rollout, step.rollout.latents
        if self._means is not None and self._means[0] is rollout:
            return
        group = rollout.total // len(rollout.prompts)
        split = len(latents) % group != 0  # the same on all processes
        images = all_gather_rows(step, latents, latents.device) if split else latents
        first = 0 if split else rollout.first // group
        self._means = rollout, first, images.unflatten(0, (-1, group)).mean(1)

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1): log r."""
        assert self._means is not None, "before_step() runs before scalars()"
        (_, first, means), old = self._means, None
        difference = rows.x0 - means[(rows.groups - first).to(means.device, non_blocking=True)]
        if not rows.on_policy:
            with torch.no_grad(), policy.adapter("old"):
                old = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance).v
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        v = rows.prediction.v
        phi = log_ratio(v - (v.detach() if old is None else old), difference)
        self.means.add("fdfo/difference", difference.square().flatten(1).mean(1).sqrt())
        self.means.add("fdfo/ratio", phi.exp())
        return phi[:, None]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        return fdfo_loss(phi[:, 0], rows.advantages, self.epsilon).sum(0)

    def after_epoch(self, policy: Policy, step: int) -> None:
        super().after_epoch(policy, step)
        self._means = None
