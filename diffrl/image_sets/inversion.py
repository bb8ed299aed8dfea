"""The path of pictures whose drawing is unknown: the sampler's ODE, run backwards (InPO, arXiv 2503.18454).

symbol   name here    meaning
x_k      states[:, k] the state at the schedule's level s_k; s_S = 0 is the picture's latent
x0, eps  prediction   of the network at x_{k+1} and s_{k+1}, the cleaner end of a step

    x_k = alpha_k x0 + sigma_k eps        for flow matching x_{k+1} + (s_k - s_{k+1}) v

This is Euler's method (for a variance preserving process DDIM's inversion), of first order in the step. A level's noise
is then what its state implies (`path_noise`), as for images whose path was stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffrl.denoising import Trajectory
from diffrl.policy import Conditioning, Policy
from diffrl.rollout import Rollout


@torch.no_grad()
def inverted_path(policy: Policy, rollout: Rollout, batch: int, snapshot: str | None = "default") -> Trajectory:
    """The states of a rollout's latents at all levels of its schedule, by the adapter `snapshot`, without guidance.

    S forwards for each image, `batch` images at a time.
    """
    schedule, n = rollout.schedule, len(rollout.latents)
    levels = schedule.tolist()
    states = rollout.latents.new_empty(n, len(levels), *rollout.latents.shape[1:])
    states[:, -1] = rollout.latents
    with policy.adapter(snapshot):
        for part in torch.arange(n).split(batch):
            cond, on = rollout.cond.select(rollout.prompt_index[part]), part.to(states.device, non_blocking=True)
            for k in range(len(levels) - 2, -1, -1):
                states[on, k] = _back(policy, rollout, states[on, k + 1], levels[k + 1], levels[k], cond)
    ends = (schedule[:-1].expand(n, -1), schedule[1:].expand(n, -1))
    t, t_next = (end.to(states.device, non_blocking=True) for end in ends)
    return Trajectory(states, t, t_next, log_prob=torch.zeros_like(t))


def _back(policy: Policy, rollout: Rollout, x: Tensor, level: float, noisier: float, cond: Conditioning) -> Tensor:
    """One step towards noise from x (B, C, h, w)."""
    t, up = x.new_full((len(x),), level), x.new_full((len(x),), noisier)
    prediction = policy.predict(x, t, cond, rollout.guidance)
    return rollout.process.add_noise(prediction.x0, prediction.eps, up)
