"""Rows of the sampler's own path, for reward gradients (R0, arXiv:2503.13070): not of noised images.

path     row of an image                          what is judged
all      its initial noise                        the image that all steps make of it, each with gradient (R0)
random   the state x_k before a random step k     x0^ = x_k - sigma_k v(x_k, sigma_k), no gradient before x_k (R0+)

R0 draws through the sampler of the rollout, so its stochastic steps, if there are any, have the rollout's noise.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffrl.denoising import SampleJob
from diffrl.forward import Prediction
from diffrl.methods.direct.rows import DirectRows
from diffrl.objectives.rows import Names, row_advantages, row_sigmas
from diffrl.policy import Conditioning, Policy
from diffrl.rollout import Rollout


def path_rows(
    path: Literal["all", "random"],
    rollout: Rollout,
    advantages: Tensor,
    pairs: Tensor,
    key: tuple[int | str, ...],
    on_policy: bool,
) -> DirectRows:
    """The rows of `pairs` (b, 2); which steps are drawn ("random") is keyed by `key` and the image, without repeats."""
    sample = pairs[:, 0]
    device, on = rollout.latents.device, sample.to(rollout.latents.device, non_blocking=True)
    owner = rollout.prompt_index[sample]
    if path == "all":
        x_t = rollout.initial_noise(sample).to(device, non_blocking=True)
        t = rollout.schedule[:1].expand(len(sample))
    else:
        assert rollout.trajectory is not None, "direct.path: random keeps the path"
        steps = len(rollout.schedule) - 1
        names: Names = [(*key, *rollout.identity(int(i))) for i in sample]
        t = row_sigmas(rollout, names, pairs[:, 1], 0, "schedule")
        step = (t[:, None] == rollout.schedule[:steps]).int().argmax(1).to(device, non_blocking=True)
        x_t = rollout.trajectory.x[on, step]
    return DirectRows(
        x0=rollout.latents[on],
        x_t=x_t,
        t=t.to(device, torch.float32, non_blocking=True),
        cond=rollout.cond.select(owner),
        advantages=row_advantages(advantages, sample, pairs[:, 1]).to(device, non_blocking=True),
        groups=owner,
        on_policy=on_policy,
        pairs=pairs,
        rollout=rollout,
    )


def path_images(path: Literal["all", "random"], policy: Policy, rows: DirectRows) -> Tensor:
    """The clean latents (b, C, h, w) that are judged, with gradient; "random" leaves its prediction in the rows."""
    if path == "all":
        assert rows.rollout is not None, "path_rows() leaves the rollout"
        return redraw(policy, rows.rollout, rows.pairs[:, 0], rows.cond)
    rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
    return rows.prediction.x0


def redraw(policy: Policy, rollout: Rollout, samples: Tensor, cond: Conditioning) -> Tensor:
    """Local images (b,) of a rollout again, by the adapter in use: latents (b, C, h, w), with gradient.

    It goes through every step. Of each step only its input is kept; the rest is computed again in the backward pass.

    cond: of the b rows. The images are the rollout's up to rounding while the adapter is the one that sampled.
    """
    spec, keys = rollout.spec, [rollout.identity(int(i)) for i in samples]
    job = _Recomputed(policy, spec, rollout.seed, rollout.epoch, None, rollout.schedule.tolist())
    return job.plan.draw(job, [text for text, _ in keys], [member for _, member in keys], cond).latents


class _Recomputed(SampleJob):
    def predict(self, x: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Prediction:
        def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            prediction = self.policy.predict(x, t, cond, guidance)
            return prediction.x0, prediction.eps, prediction.v

        return Prediction(*checkpoint(parts, x, use_reentrant=False, preserve_rng_state=False))
