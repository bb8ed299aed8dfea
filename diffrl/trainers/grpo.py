"""Flow-GRPO: policy gradients on the steps of a stochastic sampler (arXiv 2505.05470, 2505.07818).

symbol            name here        meaning
log p_theta       phi[:, 0]        log-probability of the stored step, mean over latent dimensions
ratio             ratio            exp(log p_theta - log p_sampled)
s sqrt(-dt)       std              standard deviation of the step
w                 weight           TempFlow's noise-aware weight of the step (arXiv 2508.04324), mean 1 over the steps

Two scales of the KL of a step: the exact one divides by `2 s^2 (-dt)`, the released trainers of Flow-GRPO and GARDO by
`2 s^2`, so the exact one is 1 / (-dt) times theirs. A published beta is on their scale (`kl: published`).

Under classifier-free guidance v = v_empty + g (v_cond - v_empty) depends on theta twice. The exact gradient goes
through both; with `guidance_gradient: published` v_empty is a constant, as in a released version of Flow-GRPO.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from diffrl.advantages import Std
from diffrl.config import methods
from diffrl.config.base import Section
from diffrl.forward import Prediction
from diffrl.policy import Policy
from diffrl.rollout import Rollout, SamplerSpec
from diffrl.samplers import gaussian_log_prob, sde_kernel
from diffrl.seeds import noise
from diffrl.trainers.algorithm import Credit, Given, Objective, Penalty, Scored
from diffrl.trainers.defaults import defaults_of
from diffrl.trainers.rows import Rows, row_advantages


def grpo_loss(log_prob: Tensor, sampled: Tensor, advantages: Tensor, clip: float, adv_clip: float) -> Tensor:
    """(B, K) losses `-min(ratio A, clip(ratio, 1 - e, 1 + e) A)`; log_prob and sampled (B,), advantages (B, K)."""
    ratio = (log_prob - sampled).exp()[:, None]
    a = advantages.clamp(-adv_clip, adv_clip)
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)


def step_weights(spec: SamplerSpec, rollout: Rollout) -> Tensor:
    """(n, T) weights of the stored steps that even out their gradients, mean 1 over a trajectory's steps.

    d log p / dv has the size |d mean / dv| / std per unit of noise, which grows towards clean steps; times
    std |dt| / |d mean / dv| it is |dt| for every sampler. For `flow_sde`, |d mean / dv| being (1 + a^2 / 2) |dt|, this
    is TempFlow's std_t / mean std_t; at t = 1, where it is |dt|, its code has std_t all the same, and so has this.
    """
    steps = rollout.trajectory
    assert steps is not None, "GRPO needs the trajectory"
    t, t_next = steps.t.flatten(), steps.t_next.flatten()
    noise_level = spec.noise_level if steps.noise_level is None else steps.noise_level.flatten()
    zero = t.new_zeros(len(t), 1, 1, 1)
    unit = rollout.process.from_velocity(zero, zero + 1, t)  # the mean is linear in v, and 0 here for x = v = 0
    mean, std = sde_kernel(spec.sampler, zero, unit, t, t_next, noise_level, rollout.t_second, rollout.process)
    weight = std.flatten()
    if spec.sampler != "flow_sde":
        weight = weight * (t - t_next) / mean.flatten().abs().clamp_min(1e-12)
    weight = weight.view(steps.t.shape)
    return weight / weight.mean(1, keepdim=True)


class GRPO(Objective):
    """The objective of Flow-GRPO: rows are the stored steps of the rollout's trajectory."""

    keep_trajectory = True

    @defaults_of(methods.GRPO)
    def __init__(
        self,
        spec: SamplerSpec,
        *,
        clip: float,
        adv_clip: float,
        beta: float,
        kl: Literal["exact", "published"],
        timesteps: int | None,
        order: Literal["random", "first"],
        advantage_std: Std,
        weighting: Literal["uniform", "noise"],
        guidance_gradient: Literal["exact", "published"],
        skip_zero: bool,
        credit: Credit | None = None,
    ) -> None:
        super().__init__(beta=beta, advantage_std=advantage_std)
        self.spec, self.clip, self.adv_clip = spec, clip, adv_clip
        self.kl, self.timesteps, self.order = kl, timesteps, order
        self.weighting, self.credit, self.guidance_scale = weighting, credit, spec.guidance_scale
        self.prediction_options = {"hold_empty": True} if guidance_gradient == "published" else {}
        self.skip_zero = skip_zero
        self.selects = skip_zero or (credit is not None and credit.selects)
        self.penalty = StepKL(self, beta)

    @classmethod
    def of(cls, section: Section, given: Given) -> GRPO:
        return cls(given.spec, **section.arguments(given.config), credit=given.credit)

    def rows_per_sample(self, rollout: Rollout) -> int:
        assert rollout.trajectory is not None, "GRPO needs the trajectory"
        return self.timesteps or rollout.trajectory.t.shape[1]

    def advantages(self, scored: Scored) -> Tensor:
        return self.rule(scored) if self.credit is None else self.credit.advantages(self.rule, scored)

    def share(self, group: int) -> float:
        return 1.0 if self.credit is None else self.credit.share(group)

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        if self.skip_zero:  # an image, not a row: one that has a signal at some step is trained at all of them
            samples = samples[advantages[samples].flatten(1).any(1)]
        if self.credit is None:
            return super().pairs(rollout, advantages, samples, epoch)
        return self.credit.pairs(rollout, advantages, samples, epoch)

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        trajectory = rollout.trajectory
        assert trajectory is not None, "GRPO needs the trajectory"
        device = trajectory.x.device
        sample, number = pairs[:, 0], pairs[:, 1]
        stored = trajectory.t.shape[1]
        if self.order == "random" and self.rows_per_sample(rollout) < stored:
            names = [(*key, *rollout.identity(int(i)), "timesteps") for i in sample]
            number = noise((stored,), names).argsort(dim=1).gather(1, number[:, None]).squeeze(1)
        i, j = (index.to(device, non_blocking=True) for index in (sample, number))
        return Rows(
            x0=rollout.latents[i],
            x_t=trajectory.x[i, j],
            t=trajectory.t[i, j],
            cond=rollout.cond.select(rollout.prompt_index[sample]),
            advantages=row_advantages(advantages, sample, number).to(device, non_blocking=True),
            groups=rollout.prompt_index[sample],
            on_policy=self.on_policy,
            guidance=self.spec.guidance_scale,
            x_next=trajectory.x_next[i, j],
            t_next=trajectory.t_next[i, j],
            t_second=rollout.t_second,
            log_prob=trajectory.log_prob[i, j],
            weight=step_weights(self.spec, rollout)[i, j] if self.weighting == "noise" else None,
            noise_level=None if trajectory.noise_level is None else trajectory.noise_level[i, j],
        )

    def step(self, policy: Policy, rows: Rows, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Mean (b, C, h, w) and standard deviation (b, 1, 1, 1) of the stored step under a prediction."""
        spec, process = self.spec, policy.process
        assert rows.t_next is not None, "GRPO rows carry the step's end"
        noise_level = spec.noise_level if rows.noise_level is None else rows.noise_level
        return sde_kernel(spec.sampler, rows.x_t, prediction, rows.t, rows.t_next, noise_level, rows.t_second, process)

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        assert rows.x_next is not None, "GRPO rows carry the stored next state"
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance, **self.prediction_options)
        rows.mean, rows.std = self.step(policy, rows, rows.prediction)
        return gaussian_log_prob(rows.x_next, rows.mean, rows.std)[:, None]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        assert rows.log_prob is not None, "GRPO rows carry the sampled log-probability"
        log_prob = phi[:, 0]
        # On policy the ratio is 1 by definition. Taking the log-probability just computed instead of the stored one
        # keeps rounding (other batch sizes, bf16) from using up a clip range of 1e-4.
        sampled = log_prob.detach() if rows.on_policy else rows.log_prob
        ratio = (log_prob.detach() - sampled).exp()
        self.means.add("grpo/clip_fraction", ((ratio - 1).abs() > self.clip).float())
        self.means.add("grpo/ratio", ratio)
        losses = grpo_loss(log_prob, sampled, rows.advantages, self.clip, self.adv_clip)
        return (losses if rows.weight is None else losses * rows.weight[:, None]).sum(0)


class StepKL(Penalty):
    """`beta * ||mean_theta - mean_ref||^2 / (2 s^2 (-dt))`, mean over latent dimensions; published: without `(-dt)`."""

    objective: GRPO

    def divergence(self, policy: Policy, rows: Rows, anchor: Prediction) -> Tensor:
        assert rows.mean is not None and rows.std is not None, "scalars() runs before the penalty"
        mean, _ = self.objective.step(policy, rows, anchor)
        width = rows.std
        if self.objective.kl == "published" and self.objective.spec.facts.timed:
            assert rows.t_next is not None, "GRPO rows carry the step's end"
            width = width / (rows.t - rows.t_next).sqrt().view(-1, 1, 1, 1)
        return ((rows.mean - mean).square() / (2 * width.square())).flatten(1).mean(1)
