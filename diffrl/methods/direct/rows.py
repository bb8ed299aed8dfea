"""The rows of reward gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diffrl.objectives.rows import Rows
from diffrl.prompts import Prompt
from diffrl.rollout import Rollout


@dataclass(kw_only=True)
class DirectRows(Rows):
    prompts: Sequence[Prompt] = ()  # all of the epoch's; row i has prompts[groups[i]]
    t_next: Tensor | None = None  # (b,) the level that one step leads to; None on the sampler's own path
    rollout: Rollout | None = None  # for what draws its images again, and for a second prediction
    words: Tensor | None = None  # (b, 2) int64 on the CPU: the control words of a pair of prompts (SRPO)
    factors: Tensor | None = None  # (b, 2) on the CPU: what the scores for these two prompts count
