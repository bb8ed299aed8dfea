"""The samples that GARDO's gate trusts least, as pictures with what is known of them, for the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.methods.gardo.penalty import Gardo
from diffrl.policy import Policy
from diffrl.rollout import Rollout


def gallery(
    gardo: Gardo,
    policy: Policy,
    rollout: Rollout,
    reduce: Callable[[Tensor], Tensor],
    count: int = 8,
    side: int = 256,
) -> tuple[Tensor, list[dict[str, Any]]]:
    """The epoch's samples with the highest U, highest first: images (count, 3, h, w) on the CPU, and what is known.

    Every process decodes those that it made, `reduce` puts them together. Images larger than `side` are reduced.
    Each dict: prompt, member, uncertainty, penalised, scores {name: score}, the proxy first (None: not applicable).
    """
    judged = gardo.judged
    assert judged is not None, "there are no auxiliary rewards"
    chosen = judged.u.nan_to_num(-2.0).argsort(descending=True, stable=True)[:count]
    local = chosen - rollout.first
    here = (local >= 0) & (local < len(rollout.member))
    images = policy.decode(rollout.latents[local.clamp(0, len(rollout.member) - 1).to(rollout.latents.device)])
    if max(images.shape[-2:]) > side:
        images = F.interpolate(images, size=(side, side), mode="area")
    images = reduce(images * here.to(images.device)[:, None, None, None]).cpu()
    group, rows = rollout.total // len(rollout.prompts), []
    for i in chosen.tolist():
        scores = torch.cat([judged.proxy[i : i + 1], judged.auxiliary[i]]).tolist()
        rows.append(
            {
                "prompt": rollout.prompts[i // group].text,
                "member": i % group,
                "uncertainty": _or_none(float(judged.u[i])),
                "penalised": bool(judged.gate[i]),
                "scores": dict(zip(["proxy", *gardo.auxiliary], map(_or_none, scores), strict=True)),
            }
        )
    return images, rows


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
