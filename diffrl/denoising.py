"""The sampling loops: a batch from noise to clean latents, with the stochastic steps that training needs.

Symbols: B images of a batch, S steps of which w are stochastic, V views, latents (C, h, w). Three plans: the plain
chain (with views from its states), branches from an ODE path, and a tree. What several images share is computed once in
a batch, and every image's noise is keyed by itself: so nothing depends on how images lie in batches and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from diffrl.continuations import Branches, Gains, Plan, Tree, finish, strided, tail_sigmas, thinned
from diffrl.forward import Prediction
from diffrl.samplers import DpmState, gaussian_log_prob, ode_step, sde_kernel, window_steps
from diffrl.sampling import SamplerSpec

if TYPE_CHECKING:
    from diffrl.policy import Conditioning, Policy


@dataclass
class Trajectory:
    """The w stochastic steps of n images, fp32 on the policy's device. `x` and `x_next` are views of `states`. Of a
    whole path (`Job.keep` "path") they are all S steps, and log_prob is 0 for those that draw no noise.

    states (n, w + 1, C, h, w): before each step of the window, and after the last one. t, t_next (n, w). log_prob
    (n, w): of x_next under the sampling policy, averaged over the latent dimensions. noise_level (n, w): of each
    step; None where it is the sampler's one. ends (n, w, C, h, w): where the steps do not follow one another but each
    starts from a kept state; then `states` are (n, w, C, h, w).
    """

    states: Tensor
    t: Tensor
    t_next: Tensor
    log_prob: Tensor
    noise_level: Tensor | None = None
    ends: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """(n, w, C, h, w), the state before each stochastic step."""
        return self.states[:, :-1] if self.ends is None else self.states

    @property
    def x_next(self) -> Tensor:
        """(n, w, C, h, w), the state after each stochastic step."""
        return self.states[:, 1:] if self.ends is None else self.ends


# (step, the states before it, their prediction) to those that go on: other rows of a batch, or another prediction
Steer = Callable[[int, Tensor, Prediction], tuple[Tensor, Prediction]]


@dataclass(frozen=True)
class Job:
    """What all batches of one call share; `sigmas` are Python floats, so the step loop never waits for the device."""

    policy: Policy
    spec: SamplerSpec
    seed: int
    epoch: int | str
    snapshot: str | None
    sigmas: list[float]
    keep: bool | Literal["path"] = False  # the stochastic steps; "path": all steps
    plan: Plan | None = None
    group: int = 1  # G, for the plans that need it
    count: list[int] = field(default_factory=lambda: [0])  # forwards so far, one for each image and step
    steer: Steer | None = None  # of the plain chain

    def predict(self, x: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Prediction:
        self.count[0] += len(x)
        return self.policy.predict(x, t, cond, guidance)

    def finish(
        self,
        x: Tensor,
        cond: Conditioning,
        sigmas: Sequence[float],
        solver: str = "euler",
        first: Prediction | None = None,
    ) -> Tensor:
        return finish(self.predict, self.policy.process, x, cond, sigmas, self.spec.guidance_scale, solver, first)

    @property
    def start(self) -> int:
        """The first stochastic step."""
        return window_steps(self.spec, self.seed, self.epoch).start

    @property
    def kept(self) -> range:
        """The steps whose states are kept, if any are."""
        steps = self.spec.steps if self.keep == "path" else self.spec.stochastic_steps
        return range(steps) if self.keep == "path" else range(self.start, self.start + steps)


@dataclass
class Drawn:
    """A batch: latents (B, C, h, w); views (B, V, C, h, w), None: the latents are the one view; states (B, w + 1, C, h,
    w) and log_prob (B, w) of the steps that are kept; ends (B, w, C, h, w), see `Trajectory`."""

    latents: Tensor
    views: Tensor | None = None
    states: Tensor | None = None
    log_prob: Tensor | None = None
    ends: Tensor | None = None


def empty_trajectory(job: Job, latents: Tensor) -> Trajectory:
    """Storage for the whole epoch at once; collecting batches and joining them would need it twice."""
    n, plan = len(latents), job.plan
    steps = plan.steps if isinstance(plan, Branches) else job.kept
    number, width = torch.tensor(list(steps)).expand(n, -1), len(steps)  # (n, w)
    schedule, by_step = torch.tensor(job.sigmas), job.spec.noise_by_step(job.sigmas)
    apart = isinstance(plan, Branches)
    return Trajectory(
        states=latents.new_empty(n, width if apart else width + 1, *latents.shape[1:]),
        t=schedule[number].to(latents.device, non_blocking=True),
        t_next=schedule[number + 1].to(latents.device, non_blocking=True),
        log_prob=latents.new_empty(n, width),
        noise_level=None if by_step is None else torch.tensor(by_step)[number].to(latents.device, non_blocking=True),
        ends=latents.new_empty(n, width, *latents.shape[1:]) if apart else None,
    )


def _kernel(job: Job, x: Tensor, prediction: Prediction, i: int) -> tuple[Tensor, Tensor]:
    """(mean, std) of the stochastic step i from x."""
    spec = job.spec
    by_step = spec.noise_by_step(job.sigmas)
    t, t_next = _ends(job, x, i)
    noise_level = spec.noise_level if by_step is None else x.new_full((len(x),), by_step[i])
    return sde_kernel(spec.sampler, x, prediction, t, t_next, noise_level, job.sigmas[1], job.policy.process)


def _ends(job: Job, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """t, t_next (B,) filled from Python floats: the same arithmetic as in training, where t differs by row."""
    return x.new_full((len(x),), job.sigmas[i]), x.new_full((len(x),), job.sigmas[i + 1])


def chain(job: Job, x: Tensor, cond: Conditioning, noise: Tensor) -> Drawn:
    """One step after the other: x (B, C, h, w) from pure noise to t = 0; noise (B, w, C, h, w) of the window."""
    spec, process = job.spec, job.policy.process
    first, width, kept = job.start, spec.stochastic_steps, job.kept
    state: DpmState | None = None
    states = x.new_empty(len(x), len(kept) + 1, *x.shape[1:]) if job.keep else None
    log_prob, views = x.new_zeros(len(x), len(kept)), []
    for i in range(spec.steps):
        if spec.tail is not None and i == first + width:
            x = job.finish(x, cond, tail_sigmas(job.sigmas, i, spec.tail), spec.tail_solver)
            break
        t, t_next = _ends(job, x, i)
        prediction = job.predict(x, t, cond, spec.guidance_scale)
        if job.steer is not None:
            x, prediction = job.steer(i, x, prediction)
        if not first <= i < first + width:
            x_next, state = ode_step(spec.sampler, x, prediction, t, t_next, state, process)
            if states is not None and i in kept:
                states[:, i], states[:, i + 1] = x, x_next
            x = x_next
            continue
        if isinstance(job.plan, Gains) and not (job.plan.common and i == first):
            views.append(_view(job, x, cond, i, prediction, job.plan))
        mean, std = _kernel(job, x, prediction, i)
        x_next = mean + std * noise[:, i - first]
        if states is not None:
            place = i - kept.start
            log_prob[:, place] = gaussian_log_prob(x_next, mean, std)
            states[:, place], states[:, place + 1] = x, x_next
        x = x_next
    return Drawn(x, torch.stack([*views, x], 1) if views else None, states, log_prob)


def _view(job: Job, x: Tensor, cond: Conditioning, i: int, prediction: Prediction, plan: Gains) -> Tensor:
    """The clean end of the ODE from the state x before step i, whose prediction is there already."""
    left = len(job.sigmas) - 1 - i
    sigmas = thinned(job.sigmas, i, left if plan.ode_steps is None else plan.ode_steps)
    return job.finish(x, cond, sigmas, first=prediction)


def branches(job: Job, plan: Branches, x: Tensor, cond: Conditioning, noise: Tensor, owner: Sequence[int]) -> Drawn:
    """Single stochastic steps from the states of ODE paths, each with its views.

    x (A, C, h, w): the paths' initial noise, cond (A rows): theirs; owner[i]: the path of image i; noise (B, M, ...).
    The state before a step, its mean and its std are one forward for all images of a path.
    """
    spec, process = job.spec, job.policy.process
    own = torch.tensor(owner)
    on, mine = own.to(x.device, non_blocking=True), cond.select(own)
    states, ends, log_probs, views = [], [], [], []
    for i in range(plan.steps[-1] + 1):
        t, t_next = _ends(job, x, i)
        prediction = job.predict(x, t, cond, spec.guidance_scale)
        if i in plan.steps:
            mean, std = _kernel(job, x, prediction, i)
            mean, std = mean[on], std[on]
            x_next = mean + std * noise[:, plan.steps.index(i)]
            states.append(x[on])
            ends.append(x_next)
            log_probs.append(gaussian_log_prob(x_next, mean, std))
            views += [job.finish(x_next, mine, strided(job.sigmas, i + 1, stride)) for stride in plan.strides]
        x, _ = ode_step(spec.sampler, x, prediction, t, t_next, None, process)
    stacked = torch.stack(views, 1)
    return Drawn(stacked[:, 0], stacked, torch.stack(states, 1), torch.stack(log_probs, 1), torch.stack(ends, 1))


def tree(
    job: Job, plan: Tree, x: Tensor, cond: Conditioning, leaves: Sequence[tuple[int, int]], group: int, noise: Tensor
) -> Drawn:
    """The leaves of trees, all steps stochastic: every edge is one forward, however many leaves share it.

    x (A, C, h, w): the roots' noise, cond (A rows): theirs. leaves: (root, member) of image i, member in 0 .. G - 1 of
    G = `group`. noise (B', w, ...): of the members that lead an edge of these leaves, see `leaders`; edge (root, node)
    draws that of its first member, so member 0's path is what it would be alone.
    """
    spec, width = job.spec, job.spec.stochastic_steps
    edges = [(root, 0) for root in range(len(x))]  # (root, node number) of the states in x
    index = {name: i for i, name in enumerate(leaders(plan, leaves, group, width))}
    root_cond, kept = cond, [x.new_empty(0)] * (width + 1)
    log_prob = x.new_empty(len(leaves), width)
    for i in range(spec.steps):
        span = group // plan.nodes(i)
        t, t_next = _ends(job, x, i)
        mine = root_cond.select(torch.tensor([root for root, _ in edges]))
        prediction = job.predict(x, t, mine, spec.guidance_scale)
        if i >= width:  # cps, renoise and ddim end without noise
            x, _ = ode_step(spec.sampler, x, prediction, t, t_next, None, job.policy.process)
            continue
        mean, std = _kernel(job, x, prediction, i)
        before = {name: k for k, name in enumerate(edges)}
        children = sorted({(root, member // span) for root, member in leaves})
        wide = group // plan.nodes(i - 1) if i else group
        parent = _on(x, [before[root, node * span // wide] for root, node in children])
        lead = _on(x, [index[root, node * span] for root, node in children])
        mean, std, x = mean[parent], std[parent], x[parent]
        x_next = mean + std * noise[lead, i]
        place = {name: k for k, name in enumerate(children)}
        of_leaf = _on(x, [place[root, member // span] for root, member in leaves])
        kept[i], kept[i + 1] = x[of_leaf], x_next[of_leaf]
        log_prob[:, i] = gaussian_log_prob(x_next, mean, std)[of_leaf]
        x, edges = x_next, children
    place = {name: k for k, name in enumerate(edges)}
    span = group // plan.nodes(spec.steps)
    of_leaf = _on(x, [place[root, member // span] for root, member in leaves])
    return Drawn(x[of_leaf], None, torch.stack(kept, 1) if job.keep else None, log_prob)


def _on(x: Tensor, places: list[int]) -> Tensor:
    """Where x is, without a wait: torch.tensor(..., device=...) would be one."""
    return torch.tensor(places).to(x.device, non_blocking=True)


def leaders(plan: Tree, leaves: Sequence[tuple[int, int]], group: int, width: int) -> list[tuple[int, int]]:
    """(root, member) of the first members of all edges that lead to these leaves, in order."""
    spans = {group // plan.nodes(i) for i in range(width)}
    return sorted({(root, member // span * span) for root, member in leaves for span in spans})
