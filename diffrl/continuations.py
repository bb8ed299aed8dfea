"""From a state on the way to the clean image: the ODE on what is left of the schedule; and plans of rollouts with it.

Symbols: sigmas (S + 1,) of the schedule, the last is 0; x_j the state before step j, at sigmas[j]; latents
(B, C, h, w). What goes on from one state needs nothing but the state: no noise, no history. A *view* is an image that
is decoded and scored; a sample may have several, of which one, `final`, stands for it elsewhere (features, metrics).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Gains:
    """A view from every kept state of the trajectory, by the ODE, and the final image (DenseGRPO).

    ode_steps: so many steps at most from each state, evenly over what is left; None: all. common: the first state is
    the same for the whole group (same_noise): its view would cancel in every advantage, and is left out.
    """

    common: bool
    ode_steps: int | None = None

    def views(self, spec: SamplerSpec) -> int:
        return spec.stochastic_steps + (not self.common)

    def forwards(self, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int) -> int:
        """A state's own prediction is there already, so its continuation takes one less than its steps."""
        steps = range(start + self.common, start + spec.stochastic_steps)
        most = spec.steps if self.ode_steps is None else self.ode_steps
        views = sum(min(most, spec.steps - step) - 1 for step in steps)
        return len(members) * (chain_forwards(spec, start) + views)

    def final(self, spec: SamplerSpec) -> int:
        return self.views(spec) - 1


@dataclass(frozen=True)
class Branches:
    """From the states of one ODE path per seed, single stochastic steps; each goes on by the ODE (G2RPO, TempFlow).

    seeds: paths of a group, whose members divide over them in order. steps: the stochastic step of each row, M of them,
    rising. strides: L granularities; view (k, l) of member i is number k L + l.
    """

    seeds: int
    steps: tuple[int, ...]
    strides: tuple[int, ...] = (1,)

    def views(self, spec: SamplerSpec) -> int:
        return len(self.steps) * len(self.strides)

    def forwards(self, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int) -> int:
        paths = {(prompt, member * self.seeds // group) for prompt, member in members}
        levels = range(spec.steps + 1)
        views = sum(len(strided(levels, step + 1, stride)) - 1 for step in self.steps for stride in self.strides)
        return len(paths) * (self.steps[-1] + 1) + len(members) * views

    def final(self, spec: SamplerSpec) -> int:
        return 0  # the noisiest step's: the later ones differ less and less within a path


@dataclass(frozen=True)
class Tree:
    """A group is the leaves of one tree: at each of the steps `splits` a node gets `branch` children (BranchGRPO)."""

    splits: tuple[int, ...]
    branch: int = 2

    def views(self, spec: SamplerSpec) -> int:
        return 1

    def forwards(self, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int) -> int:
        """A step is taken by the nodes that the step before led to: one for all its children."""
        taken = [1, *(self.nodes(min(step, spec.stochastic_steps - 1)) for step in range(spec.steps - 1))]
        return sum(len({(prompt, member * nodes // group) for prompt, member in members}) for nodes in taken)

    def final(self, spec: SamplerSpec) -> int:
        return 0

    def nodes(self, step: int) -> int:
        """How many edges of a tree take step `step`."""
        return self.branch ** sum(split <= step for split in self.splits)


Plan = Gains | Branches | Tree


def chain_forwards(spec: SamplerSpec, start: int) -> int:
    """Of one trajectory whose stochastic steps begin at `start`: fewer than its steps where its tail is thinned."""
    behind = start + spec.stochastic_steps
    if spec.tail is None or behind >= spec.steps:
        return spec.steps
    return behind + len(tail_sigmas(range(spec.steps + 1), behind, spec.tail)) - 1


def batch_forwards(
    plan: Plan | None, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int
) -> int:
    """Of the network for a batch of images, each a (prompt number, member of G = `group`)."""
    if plan is None:
        return len(members) * chain_forwards(spec, start)
    return plan.forwards(spec, start, members, group)


def strided(sigmas: Sequence[float], start: int, stride: int) -> list[float]:
    """The sigma of step `start`, the next one, from there on every `stride`-th; 0 in place of the last.

    As in G2RPO's code (arXiv 2510.01982): its image is the clean prediction at the last sigma but one that it keeps.
    """
    return [*[sigmas[start], *sigmas[start + 1 :: stride]][:-1], sigmas[-1]]


def tail_sigmas(sigmas: Sequence[float], start: int, share: float) -> list[float]:
    """From step `start` on only this share of the steps that are left (at least one), evenly over their numbers."""
    left = len(sigmas) - 1 - start
    return thinned(sigmas, start, max(math.ceil(left * share - 1e-9), 1))


def thinned(sigmas: Sequence[float], start: int, count: int) -> list[float]:
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
