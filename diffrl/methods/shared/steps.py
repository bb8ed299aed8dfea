"""A policy gradient on single steps of a sampler: the ratio, what holds it, and how steps weigh against each other.

symbol      name here          meaning (one row a stored step x -> x', means over latent dimensions)
mu, mu_old  mean, old          mean of the step under theta, and under the policy that drew the images
s, eps      std, -             the step's standard deviation; the noise in it, (x' - mu_old) / s
r           ratio              exp(log p_theta(x') - log p_old(x'))
r^          exp(normalised)    exp mean((mu - mu_old) eps): log r^ = s (log r + D) (GRPO-Guard, arXiv 2510.22319)
D           step_divergence    KL of the two steps, mean (mu - mu_old)^2 / (2 s^2) (Flow-DPPO, arXiv 2606.11025)

log r = -D + mean((mu - mu_old) eps) / s has the mean -D, so that one clip meets the two signs of A unequally, and a
spread that differs from step to step; log r^ has the mean 0, and is linear in mu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diffrl.forward import Prediction
from diffrl.objectives.objective import Objective
from diffrl.objectives.penalty import Penalty
from diffrl.objectives.rows import Rows, row_advantages
from diffrl.objectives.running_stats import RunningMeans
from diffrl.policy import Policy
from diffrl.rollout import Rollout, SamplerSpec
from diffrl.samplers import sde_kernel
from diffrl.seeds import noise


@dataclass(kw_only=True)
class StepRows(Rows):
    """Rows that are stored steps of the rollout's trajectory."""

    x_next: Tensor  # (b, C, h, w) the stored next state
    t_next: Tensor  # (b,)
    log_prob: Tensor  # (b,) of the step when it was sampled
    t_second: float = 1.0  # second sigma of the schedule, where s(t = 1) is evaluated
    noise_level: Tensor | None = None  # (b,) of the stored step; None: the sampler's one for all
    weight: Tensor | None = None  # (b,) of the row's loss (TempFlow); None: 1
    mean: Tensor | None = None  # (b, C, h, w) of the step under the trained LoRA, left by `scalars`
    std: Tensor | None = None  # (b, 1, 1, 1)
    divergence: Tensor | None = None  # (b,) of the step from the old policy's, left by `scalars`


@dataclass
class StoredSteps:
    """The stored steps as rows.

    Args:
        timesteps: how many of them are trained; None: all. drawn: which ones, anew for each image and epoch; else the
            first.
        weights: arguments of `step_weights`; None: all steps weigh the same.
    """

    spec: SamplerSpec
    timesteps: int | None = None
    drawn: bool = True
    weights: Mapping[str, bool] | None = None

    def count(self, rollout: Rollout) -> int:
        """T: rows of each sample."""
        assert rollout.trajectory is not None, "steps are trained, so the trajectory is kept"
        return self.timesteps or rollout.trajectory.t.shape[1]

    def rows(
        self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...], on_policy: bool
    ) -> StepRows:
        """The rows of `pairs` (b, 2)."""
        trajectory = rollout.trajectory
        assert trajectory is not None, "steps are trained, so the trajectory is kept"
        device = trajectory.x.device
        sample, number = pairs[:, 0], pairs[:, 1]
        stored = trajectory.t.shape[1]
        if self.drawn and self.count(rollout) < stored:
            names = [(*key, *rollout.identity(int(i)), "timesteps") for i in sample]
            number = noise((stored,), names).argsort(dim=1).gather(1, number[:, None]).squeeze(1)
        i, j = (index.to(device, non_blocking=True) for index in (sample, number))
        return StepRows(
            x0=rollout.latents[i],
            x_t=trajectory.x[i, j],
            t=trajectory.t[i, j],
            cond=rollout.cond.select(rollout.prompt_index[sample]),
            advantages=row_advantages(advantages, sample, number).to(device, non_blocking=True),
            groups=rollout.prompt_index[sample],
            pairs=pairs,
            on_policy=on_policy,
            guidance=self.spec.guidance_scale,
            x_next=trajectory.x_next[i, j],
            t_next=trajectory.t_next[i, j],
            t_second=rollout.t_second,
            log_prob=trajectory.log_prob[i, j],
            weight=None if self.weights is None else step_weights(self.spec, rollout, **self.weights)[i, j],
            noise_level=None if trajectory.noise_level is None else trajectory.noise_level[i, j],
        )

    def step(self, policy: Policy, rows: StepRows, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Mean (b, C, h, w) and standard deviation (b, 1, 1, 1) of the stored step under a prediction."""
        spec, process = self.spec, policy.process
        noise_level = spec.noise if rows.noise_level is None else rows.noise_level
        return sde_kernel(spec.sampler, rows.x_t, prediction, rows.t, rows.t_next, noise_level, rows.t_second, process)

    def compare(self, means: RunningMeans, rows: StepRows, log_prob: Tensor) -> None:
        """Log how far a step's log-probability (b,) is from the rollout's where theta drew it: there it is the same.

        If it is not, training computes in another way than the rollout did, and the noise that it sees in a step is
        not the noise that was drawn, while a ratio to its own value says 1.
        """
        if rows.on_policy:
            means.add("rollout/mismatch", (log_prob - rows.log_prob).abs())


class StepKL(Penalty):
    """`beta * ||mean_theta - mean_ref||^2 / (2 s^2 (-dt))`, mean over latent dimensions; published: without `(-dt)`."""

    def __init__(self, objective: Objective, beta: float, steps: StoredSteps, published: bool = False) -> None:
        super().__init__(objective, beta)
        self.steps, self.timed = steps, published and steps.spec.facts.timed

    def divergence(self, policy: Policy, rows: Rows, anchor: Prediction) -> Tensor:
        assert isinstance(rows, StepRows) and rows.mean is not None and rows.std is not None, "scalars() ran before"
        mean, _ = self.steps.step(policy, rows, anchor)
        width = rows.std
        if self.timed:
            width = width / (rows.t - rows.t_next).sqrt().view(-1, 1, 1, 1)
        return ((rows.mean - mean).square() / (2 * width.square())).flatten(1).mean(1)


def grpo_loss(log_prob: Tensor, sampled: Tensor, advantages: Tensor, clip: float, adv_clip: float) -> Tensor:
    """(B, K) losses `-min(ratio A, clip(ratio, 1 - e, 1 + e) A)`; log_prob and sampled (B,), advantages (B, K)."""
    ratio = (log_prob - sampled).exp()[:, None]
    a = advantages.clamp(-adv_clip, adv_clip)
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)


def outward(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """(B, K) bool: where the gradient pushes a row further from the policy that drew it, of its log-ratio (B,)."""
    return log_ratio[:, None] * advantages > 0


def masked_loss(log_prob: Tensor, sampled: Tensor, advantages: Tensor, beyond: Tensor, adv_clip: float) -> Tensor:
    """(B, K) losses `-M ratio A`: M is 0 where a row that is `beyond` (B,) bool the trust region would go further out.

    What is beyond it and pulled back keeps its gradient: without that the paper's training collapses.
    """
    log_ratio = log_prob - sampled
    kept = ~(beyond[:, None] & outward(log_ratio, advantages))
    return -(kept * log_ratio.exp()[:, None] * advantages.clamp(-adv_clip, adv_clip))


def step_divergence(mean: Tensor, old: Tensor, std: Tensor) -> Tensor:
    """D (B,) of means (B, C, h, w) and a common standard deviation (B, 1, 1, 1), without gradient."""
    return ((mean.detach() - old) / std).square().flatten(1).mean(1) / 2


def normalised(x_next: Tensor, mean: Tensor, old: Tensor, std: Tensor) -> Tensor:
    """log r^ (B,) of a stored step."""
    return ((mean - old) * ((x_next - old) / std)).flatten(1).mean(1)


def step_weights(spec: SamplerSpec, rollout: Rollout, *, even: bool = False, normalised: bool = False) -> Tensor:
    """(n, T) weights of the stored steps that even out their gradients, mean 1 over a trajectory's steps.

    d log p / dv has the size |d mean / dv| / std per unit of noise, which grows towards clean steps; times
    std |dt| / |d mean / dv| it is |dt| for every sampler. For `flow_sde`, |d mean / dv| being (1 + a^2 / 2) |dt|, this
    is TempFlow's std_t / mean std_t; at t = 1, where it is |dt|, its code has std_t all the same, and so has this.

    Args:
        even: std / |d mean / dv|, so that gradients are equal whatever |dt| (Flash-GRPO, arXiv 2605.15980).
        normalised: of log r^, whose gradient has a factor std already: the weights over std. With `even` they are then
            1 / |d mean / dv|, which for `flow_sde` is GRPO-Guard's 1 / |dt| but at t = 1.
    """
    steps = rollout.trajectory
    assert steps is not None, "GRPO needs the trajectory"
    t, t_next = steps.t.flatten(), steps.t_next.flatten()
    noise_level = spec.noise if steps.noise_level is None else steps.noise_level.flatten()
    zero = t.new_zeros(len(t), 1, 1, 1)
    unit = rollout.process.from_velocity(zero, zero + 1, t)  # the mean is linear in v, and 0 here for x = v = 0
    mean, std = sde_kernel(spec.sampler, zero, unit, t, t_next, noise_level, rollout.t_second, rollout.process)
    weight = std.flatten()
    if even or spec.sampler != "flow_sde":
        weight = weight * (1 if even else t - t_next) / mean.flatten().abs().clamp_min(1e-12)
    if normalised:
        weight = weight / std.flatten()
    weight = weight.view(steps.t.shape)
    return weight / weight.mean(1, keepdim=True)
