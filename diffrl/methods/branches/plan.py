"""What a rollout with branches draws: single stochastic steps from ODE paths, each with its views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from diffrl.denoising import SampledBatch, SampleJob, Trajectory, empty_trajectory
from diffrl.samplers import gaussian_log_prob, ode_step
from diffrl.sampling import SamplerSpec

if TYPE_CHECKING:
    from diffrl.policy import Conditioning


@dataclass(frozen=True)
class BranchPlan:
    """From the states of one ODE path per seed, single stochastic steps; each goes on by the ODE (G2RPO, TempFlow).

    seeds: paths of a group, whose members divide over them in order. steps: the stochastic step of each row, M of them,
    rising. strides: L granularities; view (k, l) of member i is number k L + l.
    """

    seeds: int
    steps: tuple[int, ...]
    strides: tuple[int, ...] = (1,)

    apart: ClassVar[bool] = True

    def views(self, spec: SamplerSpec) -> int:
        return len(self.steps) * len(self.strides)

    def forwards(self, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int) -> int:
        paths = {(prompt, member * self.seeds // group) for prompt, member in members}
        levels = range(spec.steps + 1)
        views = sum(len(every_kth(levels, step + 1, stride)) - 1 for step in self.steps for stride in self.strides)
        return len(paths) * (self.steps[-1] + 1) + len(members) * views

    def final(self, spec: SamplerSpec) -> int:
        return 0  # the noisiest step's: the later ones differ less and less within a path

    def allocate(self, job: SampleJob, latents: Tensor) -> Trajectory:
        return empty_trajectory(job, latents, self.steps, apart=True)

    def draw(self, job: SampleJob, texts: Sequence[str], members: Sequence[int], cond: Conditioning) -> SampledBatch:
        names = list(zip(texts, members, strict=True))
        slots = [(text, member * self.seeds // job.group) for text, member in names]
        paths = sorted(set(slots), key=slots.index)
        x = job.begin([text for text, _ in paths], [seed for _, seed in paths], same=self.seeds == 1)
        own = cond.select(torch.tensor([slots.index(path) for path in paths]))
        noise = job.step_noise(names, len(self.steps))
        return branches(job, self, x, own, noise, [paths.index(slot) for slot in slots])


def every_kth(sigmas: Sequence[float], start: int, stride: int) -> list[float]:
    """The sigma of step `start`, the next one, from there on every `stride`-th; 0 in place of the last.

    As in G2RPO's code (arXiv 2510.01982): its image is the clean prediction at the last sigma but one that it keeps.
    """
    return [*[sigmas[start], *sigmas[start + 1 :: stride]][:-1], sigmas[-1]]


def branches(
    job: SampleJob, plan: BranchPlan, x: Tensor, cond: Conditioning, noise: Tensor, owner: Sequence[int]
) -> SampledBatch:
    """Single stochastic steps from the states of ODE paths, each with its views.

    x (A, C, h, w): the paths' initial noise, cond (A rows): theirs; owner[i]: the path of image i; noise (B, M, ...).
    The state before a step, its mean and its std are one forward for all images of a path.
    """
    spec, process = job.spec, job.policy.process
    own = torch.tensor(owner)
    on, mine = own.to(x.device, non_blocking=True), cond.select(own)
    states, ends, log_probs, views = [], [], [], []
    for i in range(plan.steps[-1] + 1):
        t, t_next = job.ends(x, i)
        prediction = job.predict(x, t, cond, spec.guidance_scale)
        if i in plan.steps:
            mean, std = job.kernel(x, prediction, i)
            mean, std = mean[on], std[on]
            x_next = mean + std * noise[:, plan.steps.index(i)]
            states.append(x[on])
            ends.append(x_next)
            log_probs.append(gaussian_log_prob(x_next, mean, std))
            views += [job.finish(x_next, mine, every_kth(job.sigmas, i + 1, stride)) for stride in plan.strides]
        x, _ = ode_step(spec.sampler, x, prediction, t, t_next, None, process)
    stacked = torch.stack(views, 1)
    return SampledBatch(stacked[:, 0], stacked, torch.stack(states, 1), torch.stack(log_probs, 1), torch.stack(ends, 1))
