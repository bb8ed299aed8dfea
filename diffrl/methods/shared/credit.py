"""Credit over the steps of a trajectory: what scored views say of each row (n, T, K), instead of one number a sample.

A credit is part of GRPO (`GRPO.credit`). It says which plan the rollout follows (`diffrl.continuations`), makes row
advantages of the views' scores, and may leave rows out.

Symbols: N samples of P groups of G, T rows per sample, V views, K rewards.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diffrl.objectives.advantages import AdvantageRule, ScoredBatch


def advantages_per_step(
    rule: AdvantageRule, scored: ScoredBatch, values: Tensor, groups: Tensor | None = None
) -> Tensor:
    """(N, T, columns): `rule` for each row number by itself, of values (N, T, K); the samples' `groups` (N,) else.

    By itself also where the std is that of the batch: the steps differ in scale.
    """
    group_ids = scored.groups if groups is None else groups
    each = [rule(replace(scored, scores=value, groups=group_ids, views=None)) for value in values.unbind(1)]
    return torch.stack(each, 1)


def view_scores(scored: ScoredBatch) -> Tensor:
    """(N, V, K)."""
    return scored.scores[:, None] if scored.views is None else scored.views
