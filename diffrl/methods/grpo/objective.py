"""Flow-GRPO: policy gradients on the steps of a stochastic sampler (arXiv 2505.05470, 2505.07818).

symbol            name here        meaning
log p_theta       phi[:, 0]        log-probability of the stored step, mean over latent dimensions
ratio             ratio            exp(log p_theta - log p_sampled)
s sqrt(-dt)       std              standard deviation of the step
w                 weight           of the step: TempFlow's (arXiv 2508.04324) or Flash-GRPO's, mean 1 over the steps

GRPO-Guard's ratio (phi is then log r^) and Flow-DPPO's trust region are in `shared/steps.py`. Both compare means
of a step, and in bf16 one from another batch shape is already as far away as they allow. So the old mean, and with it
log p_sampled, is not the rollout's, but of the snapshot "old" with the very rows and autocast of the gradient pass.

Two scales of the KL of a step: the exact one divides by `2 s^2 (-dt)`, the released trainers of Flow-GRPO and GARDO by
`2 s^2`, so the exact one is 1 / (-dt) times theirs. A published beta is on their scale (`published: [kl]`).

Under classifier-free guidance v = v_empty + g (v_cond - v_empty) depends on theta twice. The exact gradient goes
through both; with `published: [guidance]` v_empty is a constant, as in a released version of Flow-GRPO.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from diffrl.config.base import Section
from diffrl.config.methods import Decay
from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.grpo import GRPOSection
from diffrl.methods.shared.steps import (
    StepKL,
    StepRows,
    StoredSteps,
    grpo_loss,
    masked_loss,
    normalised,
    outward,
    step_divergence,
)
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.objective import BuildContext, Cost, Objective
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy
from diffrl.rollout import Rollout, SamplerSpec
from diffrl.samplers import gaussian_log_prob

if TYPE_CHECKING:
    from diffrl.objectives.credit import Credit

log = logging.getLogger(__name__)


class GRPO(Objective):
    """The objective of Flow-GRPO: rows are the stored steps of the rollout's trajectory."""

    keep_trajectory = True

    def __init__(
        self, spec: SamplerSpec, keys: GRPOSection | None = None, *, credit: Credit | None = None, **values: Any
    ) -> None:
        keys = GRPOSection.of(keys, values)
        self.normalised, self.delta = keys.ratio == "normalised", keys.delta
        self.replays = self.normalised or keys.delta is not None  # the old mean, by a snapshot: a copy each epoch
        decays = {"old": Decay(slope=0.0)} if self.replays else {}
        super().__init__(beta=keys.beta, advantage_std=keys.advantage_std, decays=decays)
        self.clip, self.adv_clip = keys.clip, keys.adv_clip
        weights = {"even": keys.weighting == "even", "normalised": self.normalised}
        how = None if keys.weighting == "uniform" else weights
        self.steps = StoredSteps(spec, keys.timesteps, "first" not in keys.published, how)
        self.credit, self.guidance_scale = credit, spec.guidance_scale
        self.prediction_options = {"hold_empty": True} if "guidance" in keys.published else {}
        self.skip_zero = "skip_zero" in keys.published
        self.selects = self.skip_zero or (credit is not None and credit.selects)
        self.penalties = [StepKL(self, keys.beta, self.steps, published=keys.kl == "published")]

    @classmethod
    def of(cls, section: Section, given: BuildContext) -> GRPO:
        objective = cls(given.spec, section, credit=given.credit)  # type: ignore[arg-type]
        if objective.delta is not None and given.config.optimiser_steps == 1:
            log.warning("grpo.delta stops nothing with one optimiser step an epoch: theta is old there")
        return objective

    def rows_per_sample(self, rollout: Rollout) -> int:
        return self.steps.count(rollout)

    def advantages(self, scored: ScoredBatch) -> Tensor:
        return self.rule(scored) if self.credit is None else self.credit.advantages(self.rule, scored)

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        if self.skip_zero:  # an image, not a row: one that has a signal at some step is trained at all of them
            samples = samples[advantages[samples].flatten(1).any(1)]
        if self.credit is None:
            return super().pairs(rollout, advantages, samples, epoch)
        return self.credit.pairs(rollout, advantages, samples, epoch)

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        share = 1.0 if self.credit is None else self.credit.share(rollout.group_size)
        forwards = 1 - 1 / steps if self.replays else 0.0  # on policy the old mean is theta's
        return Cost(share=share, forwards=forwards, waiting=self.replays)

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> StepRows:
        return self.steps.rows(rollout, advantages, pairs, key, self.on_policy)

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        assert isinstance(rows, StepRows), "rows() makes them"
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance, **self.prediction_options)
        rows.mean, rows.std = self.steps.step(policy, rows, rows.prediction)
        log_prob = gaussian_log_prob(rows.x_next, rows.mean, rows.std)
        self.steps.compare(self.means, rows, log_prob)
        if self.replays:
            old = rows.mean.detach() if rows.on_policy else self._old_mean(policy, rows)
            rows.divergence = step_divergence(rows.mean, old, rows.std)
            if not rows.on_policy:
                self.means.spread("grpo/divergence", rows.divergence)
            if self.normalised:
                rows.log_prob = torch.zeros_like(rows.divergence)
                return normalised(rows.x_next, rows.mean, old, rows.std)[:, None]
            rows.log_prob = gaussian_log_prob(rows.x_next, old, rows.std)
        return log_prob[:, None]

    def _old_mean(self, policy: Policy, rows: StepRows) -> Tensor:
        """(b, C, h, w) mean of the stored step under the policy that drew it, without gradient."""
        with torch.no_grad(), policy.adapter("old"):
            old = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance, **self.prediction_options)
            return self.steps.step(policy, rows, old)[0]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        rows = cast(StepRows, rows)
        log_prob = phi[:, 0]
        # On policy the ratio is 1 by definition. Taking the log-probability just computed instead of the stored one
        # keeps rounding (other batch sizes, bf16) from using up a clip range of 1e-4.
        sampled = log_prob.detach() if rows.on_policy else rows.log_prob
        log_ratio = log_prob.detach() - sampled
        ratio = log_ratio.exp()
        self.means.add("grpo/ratio", ratio)
        if self.delta is not None:
            assert rows.divergence is not None, "scalars() measures the divergence"
            beyond = rows.divergence > self.delta
            losses = masked_loss(log_prob, sampled, rows.advantages, beyond, self.adv_clip)
        else:
            beyond = (ratio - 1).abs() > self.clip
            self.means.add("grpo/clip_fraction", beyond.float())
            losses = grpo_loss(log_prob, sampled, rows.advantages, self.clip, self.adv_clip)
        stopped = (beyond[:, None] & outward(log_ratio, rows.advantages)).float().flatten()
        for sign, where in (("positive", rows.advantages > 0), ("negative", rows.advantages < 0)):
            self.means.add(f"grpo/stopped/{sign}", stopped, where.flatten())
        return (losses if rows.weight is None else losses * rows.weight[:, None]).sum(0)
