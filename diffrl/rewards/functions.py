"""What people write as a reward, brought to the protocol: functions and classes of one, two or three arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensor(scores: Any) -> Any:
    """A list, tuple or array of numbers as a tensor, None as NaN; anything else as it is, for the checks to name."""
    if isinstance(scores, np.ndarray) and scores.dtype != object:
        return torch.from_numpy(np.ascontiguousarray(scores)) if scores.dtype.kind in "fiub" else scores
    if isinstance(scores, np.ndarray):
        scores = scores.tolist()
    if not isinstance(scores, list | tuple):
        return scores
    try:
        if any(isinstance(one, list | tuple) for one in scores):
            return torch.stack([as_tensor(row) for row in scores])
        if scores and all(isinstance(one, bool | np.bool_) for one in scores):
            return torch.tensor(scores)
        return torch.tensor([float("nan") if one is None else float(one) for one in scores], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return scores


def scores_of(answer: Any) -> Tensor | Any:
    """`as_tensor`, in the reward's own precision where it is a tensor."""
    return answer if isinstance(answer, Tensor) else as_tensor(answer)
