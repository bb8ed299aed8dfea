"""Rows: the (sample, timestep) pairs that an objective trains on.

Symbols: n local samples, T training rows per sample, b rows of a micro-batch, K rewards; latents (b, C, h, w).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, Self

import torch
from torch import Tensor

from diffrl.forward import Prediction, Process
from diffrl.policy import Conditioning
from diffrl.rollout import Rollout
from diffrl.seeds import noise

TimestepSampling = Literal["schedule", "uniform", "logit_normal", "logit_normal_3"]
Names = list[tuple[int | str, ...]]  # what each row's random numbers are keyed by


@dataclass
class Rows:
    """A micro-batch of (sample, timestep) pairs; a method whose scalars need more of them has a subclass."""

    x0: Tensor  # (b, C, h, w) clean latents of the generated images
    x_t: Tensor  # (b, C, h, w) network input
    t: Tensor  # (b,) sigma in [0, 1]
    cond: Conditioning  # of the b rows
    advantages: Tensor  # (b, K)
    groups: Tensor  # (b,) int64 on the CPU
    on_policy: bool  # True while the trained LoRA equals the snapshot that sampled
    pairs: Tensor  # (b, 2) int64 on the CPU: (local sample, row number)
    guidance: float = 1.0
    prediction: Prediction | None = None  # of the trained LoRA, left here by `scalars` for the penalty
    eps: Tensor | None = None  # (b, C, h, w) the noise in x_t, of images that are noised again
    known: Tensor | None = None  # (b, K) bool: where a reward applies; None: everywhere

    def select(self, index: Tensor) -> Self:
        """The rows `index` (n,) int64 on the CPU, with whatever `scalars` left in them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value[index.to(value.device, non_blocking=True)]
            elif isinstance(value, Conditioning):
                values[name] = value.select(index)
            elif isinstance(value, Prediction):
                on = index.to(value.v.device, non_blocking=True)
                values[name] = Prediction(value.x0[on], value.eps[on], value.v[on])
        return type(self)(**values)

    def places(self) -> tuple[Tensor, Tensor]:
        """Local sample and row number, each (b,), on the device."""
        pairs = self.pairs.to(self.t.device, non_blocking=True)
        return pairs[:, 0], pairs[:, 1]

    def velocity(self, process: Process) -> Tensor:
        """(b, C, h, w) the true velocity of the noised images."""
        assert self.eps is not None, "noised_rows() sets the noise"
        return process.velocity(self.x0, self.eps, self.t)


def row_advantages(advantages: Tensor, sample: Tensor, number: Tensor) -> Tensor:
    """(b, K) of advantages per sample (n, K), or per sample and row (n, T, K)."""
    return advantages[sample] if advantages.ndim == 2 else advantages[sample, number]


def row_sigmas(
    rollout: Rollout,
    names: Names,
    number: Tensor,
    count: int,
    sampling: TimestepSampling,
    levels: int | None = None,
) -> Tensor:
    """Sigmas (b,) on the CPU of the rows `number` (b,) of `count`: a shuffled part of the sampling schedule's own
    ("schedule", only the `levels` noisiest if given), or random ones; keyed by `names`, so rows with one name and
    number share their level."""
    if sampling == "schedule":
        usable = rollout.schedule[:-1][:levels]  # the last entry is 0, a clean image
        if count == len(usable):
            return usable[number]
        ranks = noise((len(usable),), [(*name, "timesteps") for name in names]).argsort(dim=1)
        return usable[ranks.gather(1, number[:, None]).squeeze(1)]
    normal = noise((), [(*name, "level", int(j)) for name, j in zip(names, number, strict=True)])
    if sampling.startswith("logit_normal"):
        shift = 3.0 if sampling == "logit_normal_3" else 1.0
        return (normal + math.log(shift)).sigmoid()  # s t / (1 + (s - 1) t) of t = sigmoid(normal)
    return torch.special.ndtr(normal).clamp(1e-4, 1.0)  # the normal's distribution function is uniform
