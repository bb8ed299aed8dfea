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

import torch
from torch import Tensor

from diffrl.rollout import Rollout, SamplerSpec
from diffrl.samplers import sde_kernel


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
    noise_level = spec.noise_level if steps.noise_level is None else steps.noise_level.flatten()
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
