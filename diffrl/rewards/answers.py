"""Whether a reward answers, and what, checked: a finite number for each image, or a row of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl.errors import in_one_line
from diffrl.prompts import Prompt
from diffrl.rewards.protocol import Reward, RewardError, ability

# A float32 still tells 1e9 from 1e9 + 64; farther out differences between images are lost, and their squares overflow.
LARGEST = 1e9


def subject(name: str, texts: Sequence[str]) -> str:
    return f'reward "{name}" on the prompt "{texts[0]}"' + (f" and {len(texts) - 1} more" if len(texts) > 1 else "")


def as_tensor(scores: Any) -> Any:
    """A list, tuple, array or iterator of numbers as a tensor, None as NaN; anything else as it is, for the checks."""
    if isinstance(scores, Iterator):
        scores = list(scores)
    if isinstance(scores, np.ndarray) and scores.dtype.kind in "fiu":  # widened: also a copy, in the native byte order
        return torch.from_numpy(np.ma.filled(scores.astype(np.float64), np.nan))
    if isinstance(scores, np.ndarray) and scores.dtype.kind in "bO":
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


def checked(
    scores: object, name: str, texts: Sequence[str], plugin: str | None = None, width: int | None = None
) -> Tensor:
    """The reward's answer as float32 on the CPU.

    `RewardError` unless it is a list, array or tensor (b,), or (b, width), of real numbers, floating or whole, at most
    `LARGEST` in size, or NaN (None in a list): no score, in rows of columns one that does not apply. Booleans are
    refused: they are more often a mistake than a score, and `.float()` says that they are meant.
    """
    if not isinstance(scores, Tensor):
        scores = as_tensor(scores)
    on, shape = subject(name, texts), (len(texts),) if width is None else (len(texts), width)
    todo = f'correct its __call__ (try "diffrl rewards check {plugin or name}")'
    if not isinstance(scores, Tensor):
        raise RewardError(f"{on} returned a {type(scores).__name__} instead of a tensor of shape {shape}; {todo}")
    if tuple(scores.shape) != shape:
        raise RewardError(f"{on} returned the shape {tuple(scores.shape)} instead of {shape}; {todo}")
    if scores.dtype == torch.bool or scores.is_complex():
        kind = "booleans; return scores.float()" if scores.dtype == torch.bool else "complex numbers"
        raise RewardError(f"{on} returned {kind}; {todo}")
    scores = scores.detach().to("cpu", torch.float32)
    rows = scores[:, None] if width is None else scores
    if rows.isinf().any():
        worst = int(rows.isinf().any(1).nonzero()[0])
        where = f'reward "{name}" returned {_first(rows[worst], ~rows[worst].isinf())} for the prompt "{texts[worst]}"'
        raise RewardError(f"{where}; look at the image for non-finite pixels, or return NaN where there is no score")
    sizes = rows.abs().nan_to_num(0.0).amax(1) if rows.numel() else rows.sum(1)
    if len(scores) and float(sizes.max()) > LARGEST:
        worst = int(sizes.argmax())
        value = f"{_first(rows[worst], ~(rows[worst].abs() > LARGEST)):g}"
        where = f'reward "{name}" returned {value} for the prompt "{texts[worst]}"'
        raise RewardError(f"{where}; a score may be at most {LARGEST:g} in size: scale it")
    return scores


def _first(row: Tensor, fine: Tensor) -> float:
    """The first value of a row that is not `fine`."""
    return float(row[~fine][0])


def applies(reward: Reward, prompt: str, metadata: Mapping) -> bool:
    """Whether `reward` can judge images of this prompt. Rewards that declare nothing judge all.

    Raises `RewardError` if the reward cannot say.
    """
    declared = ability(reward, "applies")
    try:
        return True if declared is None else bool(declared(prompt, dict(metadata)))
    except RewardError:  # of a served reward: it has said what there is to say
        raise
    except (Exception, SystemExit) as error:
        name = getattr(reward, "name", "?")
        problem = f'applies() of reward "{name}" failed on the prompt "{prompt}" with {in_one_line(error)}'
        raise RewardError(problem) from error


def judged(reward: Reward, prompts: Sequence[Prompt]) -> list[int]:
    """The places of those prompts whose images `reward` can judge, see `applies`."""
    from diffrl.process_state import unchanged_by

    if ability(reward, "applies") is None:
        return list(range(len(prompts)))
    with unchanged_by(getattr(reward, "name", "?")):
        return [i for i, prompt in enumerate(prompts) if applies(reward, prompt.text, prompt.metadata)]
