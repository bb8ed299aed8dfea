"""How a group's scores become advantages, where a config has the section `advantages`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffrl.advantages import Std, group_advantages, group_mean
from diffrl.errors import UserError

Agree = Literal["keep", "leave_out", "floor"]


@dataclass(frozen=True)
class Estimator:
    """Group advantages with what to do where groups agree; called like `group_advantages`. All values are in units of
    the scores that it gets: those of one reward, or the weighted sum.

    agree: what a group without a spread gives.
        "keep": nothing is done. "leave_out": no advantage where the group's std is at most `least`; the others are
        scaled up by their share, so that the mean is over them (DAPO, arXiv 2503.14476). "floor": the std that divides
        is at least `least`.
    ban: (std, mean): no advantage where the group's std is below and its mean above (RationalRewards, 2604.11626).
    """

    agree: Agree = "keep"
    least: float = 1e-3
    ban: tuple[float, float] | None = None

    def __call__(self, scores: Tensor, groups: Tensor, std: Std = "group") -> Tensor:
        values = scores.double()
        mean = group_mean(values, groups)
        spread = group_mean((values - mean).square(), groups).sqrt()
        if self.agree == "floor" and std == "group":
            found = ((values - mean) / spread.clamp_min(self.least)).nan_to_num(0.0)
        else:
            found = group_advantages(values, groups, std)
        silent = torch.zeros_like(values, dtype=torch.bool)
        if self.agree == "leave_out":
            silent = spread <= self.least
        if self.ban is not None:
            silent = silent | ((spread < self.ban[0]) & (mean > self.ban[1]))
        found = found.masked_fill(silent, 0.0)
        if self.agree == "leave_out":
            known = ~values.isnan()
            kept = (known & ~silent).sum(0, keepdim=True)
            found = found * known.sum(0, keepdim=True) / kept.clamp_min(1)
        return found.to(scores.dtype)


@dataclass(frozen=True)
class Checked:
    """A rule, perhaps a user's, that raises UserError instead of returning what is no (N, K) of finite numbers."""

    rule: Callable[..., Tensor]
    name: str

    def __call__(self, scores: Tensor, groups: Tensor, std: Std = "group") -> Tensor:
        found = self.rule(scores, groups, std)
        if not isinstance(found, Tensor) or found.shape != scores.shape or not found.is_floating_point():
            got = f"{found.dtype} of {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            wanted = f"floats of the scores' shape {tuple(scores.shape)}"
            raise UserError(f'advantage rule "{self.name}": expected {wanted}, got {got}')
        if not bool(found.isfinite().all()):
            known = not bool(found[~scores.isnan()].isfinite().all())
            where = "an advantage is not finite" if known else "a score that does not apply (NaN) has to give 0"
            raise UserError(f'advantage rule "{self.name}": {where}')
        return found.to(scores.dtype)
