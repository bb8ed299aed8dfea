"""PRDP: proximal reward difference prediction (arXiv 2402.08714), on GRPO's rows.

symbol        name here        meaning
r^_i          plain            mean over the T steps of log p_theta(x_{t-1} | x_t) / p_ref(x_{t-1} | x_t)
r~_i          clipped          the same with each step's log-ratio held to +-e of that of the model that sampled
Delta r / b   Delta A / b      difference of rewards (advantages here, whose differences are those of the scores)

    L = mean over pairs with r_i > r_j of  max( (D r^ - D r / b)^2, (D r~ - D r / b)^2 )

All pairs of a group equal centring: sum_{i<j} (d_i - d_j)^2 = G sum_i (d_i - mean d)^2, the form that CRD takes on the
forward process with the old model as its reference. Here the pairs are kept, since the maximum is taken pair by pair.
Zero loss is the KL-regularised optimum. Log-probabilities are means over latent dimensions, so b is not the paper's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffrl.config.base import Section
from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.prdp import PRDPSection
from diffrl.methods.shared.coupling import GroupLoss
from diffrl.methods.shared.steps import StepKL, StepRows, StoredSteps
from diffrl.objectives.objective import BuildContext, Cost, Objective, OptimiserStep
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy
from diffrl.rollout import Rollout, SamplerSpec
from diffrl.samplers import gaussian_log_prob

CLIP = 1e-4  # a step's log-ratio is held within this of the sampling model's


def prdp_loss(ratio: Tensor, old: Tensor, rewards: Tensor, clip: float) -> Tensor:
    """(P, K) losses of log-ratios to the reference (P, G, T), the sampling model's (P, G, T) and r / b (P, G, K).

    Mean over the G (G - 1) / 2 pairs; a pair with equal rewards counts: its ratios should be equal, too.
    """
    plain, clipped = ratio.mean(2), torch.clamp(ratio, old - clip, old + clip).mean(2)
    target = rewards[:, :, None] - rewards[:, None]  # (P, G, G, K)

    def squares(values: Tensor) -> Tensor:
        return ((values[:, :, None] - values[:, None])[..., None] - target).square()

    worse = torch.maximum(squares(plain), squares(clipped))
    members = ratio.shape[1]
    return worse.sum((1, 2)) / (members * (members - 1))  # each pair was counted twice


class PRDP(Objective):
    """Rows, steps and their log-probabilities are GRPO's; the loss is the regression above."""

    keep_trajectory = True
    whole_groups = True

    def __init__(self, spec: SamplerSpec, keys: PRDPSection | None = None, **values: Any) -> None:
        keys = PRDPSection.of(keys, values)
        super().__init__(advantage_std="group")
        self.b, self.clip = keys.b, CLIP
        self.steps, self.guidance_scale = StoredSteps(spec), spec.guidance_scale
        self.penalties = [StepKL(self, 0.0, self.steps)]
        self.coupling = GroupLoss(self._slopes, count=2)

    @classmethod
    def of(cls, section: Section, given: BuildContext) -> PRDP:
        return cls(given.spec, section)  # type: ignore[arg-type]

    def rows_per_sample(self, rollout: Rollout) -> int:
        return self.steps.count(rollout)

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> StepRows:
        return self.steps.rows(rollout, advantages, pairs, key, self.on_policy)

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        # The log-probabilities of the reference and, but for the epoch's first step, of theta.
        return Cost(forwards=2 - 1 / steps)

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        """Slopes dL/d log p of all rows of the step, from both log-ratios."""
        self.coupling.measure(self, policy, step, lambda rows: self._ratios(policy, rows))

    def _slopes(self, measured: Tensor, advantages: Tensor, mine: Tensor) -> Tensor:
        ratio, old = measured
        leaf = ratio.detach().requires_grad_()
        with torch.enable_grad():
            losses = prdp_loss(leaf, old, advantages / self.b, self.clip)
            slopes = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in losses.sum(0)]
        self.means.add("prdp/loss", losses.sum(1), mine)
        moved = (ratio - old).abs() > self.clip
        self.means.add("prdp/clip_fraction", moved, mine[:, None, None].expand_as(moved))
        # times G T: the mean over a step's rows is then the mean over its groups
        return torch.stack(slopes, -1) * (ratio.shape[1] * ratio.shape[2])

    def _ratios(self, policy: Policy, rows: Rows) -> tuple[Tensor, Tensor]:
        """log p_theta / p_ref and log p_old / p_ref, (b,) each, without gradient; on policy they are the same."""
        assert isinstance(rows, StepRows), "rows() makes them"
        with policy.adapter(None):
            anchor = self._log_prob(policy, rows)
        old = rows.log_prob - anchor
        return (old, old) if self.on_policy else (self._log_prob(policy, rows) - anchor, old)

    def _log_prob(self, policy: Policy, rows: StepRows) -> Tensor:
        prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        return gaussian_log_prob(rows.x_next, *self.steps.step(policy, rows, prediction))

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1): log p_theta of the stored step."""
        assert isinstance(rows, StepRows), "rows() makes them"
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        rows.mean, rows.std = self.steps.step(policy, rows, rows.prediction)
        log_prob = gaussian_log_prob(rows.x_next, rows.mean, rows.std)
        self.steps.compare(self.means, rows, log_prob)
        return log_prob[:, None]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        return self.coupling.loss(phi, rows)
