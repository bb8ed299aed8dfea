"""Ctrl-U's confidence (arXiv 2410.11236) as a weight of `direct`: a reward counts less where two predictions disagree.

symbol     name here   meaning
x0^        -           what one step predicts of an image that is noised to the level t
x0^'       other       the same of the same image and noise at a neighbouring level, 1 of 1,000 higher
R, R'      phi, other  their rewards, times the weights
u          u           |R - R'| / scale: the disagreement
c          cap         the reward above which nothing is wanted, so that relu(c - R) is the reward's loss, at least 0

    L = relu(c - R) exp(-u) + price u

exp(-u) carries its gradient, as in the released code: alone it would reward disagreement, which the price makes dear.
With u = 0 it is the loss without confidence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diffrl.forward import Process
from diffrl.methods.direct.rows import DirectRows


def neighbours(rows: DirectRows, process: Process, step: float) -> DirectRows:
    """The rows' images with their noise, `step` above each level; below it where that would leave the schedule."""
    assert rows.rollout is not None and rows.eps is not None, "rows of `direct` with confidence"
    above = rows.t + step
    t = torch.where(above > float(rows.rollout.schedule[0]), rows.t - step, above)
    return replace(rows, x_t=process.add_noise(rows.x0, rows.eps, t), t=t)


def uncertainty(phi: Tensor, other: Tensor, scale: float) -> Tensor:
    """u (b, K) of the rewards (b, K) of two predictions."""
    return (phi - other).abs() / scale


def trusted_loss(phi: Tensor, cap: float, price: float) -> Tensor:
    """(b, K) losses of phi = (R, u), (b, 2 K)."""
    reward, u = phi.chunk(2, dim=1)
    return (cap - reward).relu() * (-u).exp() + price * u
