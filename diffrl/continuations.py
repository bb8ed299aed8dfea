"""From a state on the way to the clean image: the ODE on what is left of the schedule.

Symbols: sigmas (S + 1,) of the schedule, the last is 0; x_j the state before step j, at sigmas[j]; latents
(B, C, h, w). What goes on from one state needs nothing but the state: no noise, no history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from diffrl.forward import FlowMatching, Prediction, Process
from diffrl.samplers import DpmState, ode_step
from diffrl.sampling import SamplerSpec

if TYPE_CHECKING:
    from diffrl.policy import Conditioning


class Predict(Protocol):
    """(x, t, cond, guidance) -> Prediction."""

    def __call__(self, x: Tensor, t: Tensor, cond: Conditioning, guidance: float, /) -> Prediction: ...


def chain_forwards(spec: SamplerSpec, start: int) -> int:
    """Of one trajectory whose stochastic steps begin at `start`: fewer than its steps where its tail is thinned."""
    behind = start + spec.stochastic_steps
    if spec.tail is None or behind >= spec.steps:
        return spec.steps
    return behind + len(tail_sigmas(range(spec.steps + 1), behind, spec.tail)) - 1


def tail_sigmas(sigmas: Sequence[float], start: int, share: float) -> list[float]:
    """From step `start` on only this share of the steps that are left (at least one), evenly over their numbers."""
    left = len(sigmas) - 1 - start
    return subsample_schedule(sigmas, start, max(math.ceil(left * share - 1e-9), 1))


def subsample_schedule(sigmas: Sequence[float], start: int, count: int) -> list[float]:
    """From step `start` on at most `count` steps, evenly over the numbers of those that are left."""
    left = len(sigmas) - 1 - start
    count = min(count, left)
    return [sigmas[start + round(i * left / count)] for i in range(count + 1)] if left else list(sigmas[start:])


def finish(
    predict: Predict,
    process: Process,
    x: Tensor,
    cond: Conditioning,
    sigmas: Sequence[float],
    guidance: float,
    solver: str = "euler",
    first: Prediction | None = None,
) -> Tensor:
    """The ODE from x at sigmas[0] to sigmas[-1] = 0 in len(sigmas) - 1 forwards, by "euler" or "dpm2".

    `first`: the prediction at x, where it is known already: one forward less. For a variance preserving process "euler"
    is DDIM without noise, the same first order.
    """
    if solver == "euler" and not isinstance(process, FlowMatching):
        solver = "ddim"
    state: DpmState | None = None
    for sigma, following in pairwise(sigmas):
        t, t_next = x.new_full((len(x),), sigma), x.new_full((len(x),), following)
        prediction = predict(x, t, cond, guidance) if first is None else first
        x, state = ode_step(solver, x, prediction, t, t_next, state, process)
        first = None
    return x
