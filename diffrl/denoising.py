"""The sampling loop: a batch from noise to clean latents, with the stochastic steps that training needs.

Symbols: B images of a batch, S steps of which w are stochastic, V views, latents (C, h, w). A plan says what a batch
draws: the plain `Chain`, or what a method brings (`SamplePlan`). What several images share is computed once in a batch,
and every image's noise is keyed by itself: so nothing depends on how images lie in batches and processes.

A *view* is an image that is decoded and scored; a sample may have several, of which one, `final`, stands for it
elsewhere (features, metrics).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from diffrl.forward import Prediction
from diffrl.samplers import DpmState, gaussian_log_prob, ode_step, sde_kernel, window_steps
from diffrl.sampling import SamplerSpec
from diffrl.seeds import noise as noise_of

if TYPE_CHECKING:
    from diffrl.policy import Conditioning, Policy


TAIL_SOLVER = "dpm2"  # what takes the steps of a tail
EVALUATION = "evaluation"  # takes the epoch's place in the keys, so that no training image shares noise with these


def initial_noise(
    shape: Sequence[int],
    texts: Sequence[str],
    members: Sequence[int],
    *,
    seed: int,
    epoch: int | str = EVALUATION,
    same_noise: bool = False,
) -> Tensor:
    """The latents that sampling starts from: (B, *shape) float32 on the CPU; row i for texts[i], members[i].

    It is what a plain pipeline must be given as `latents` to make the same picture.
    """
    whose = [(text,) if same_noise else (text, m) for text, m in zip(texts, members, strict=True)]
    return noise_of(tuple(shape), [(seed, epoch, *owner, "initial") for owner in whose])


@dataclass
class Trajectory:
    """The w stochastic steps of n images, fp32 on the policy's device. `x` and `x_next` are views of `states`. Of a
    whole path (`SampleJob.keep` "path") they are all S steps, and log_prob is 0 for those that draw no noise.

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
class SampleJob:
    """What all batches of one call share; `sigmas` are Python floats, so the step loop never waits for the device."""

    policy: Policy
    spec: SamplerSpec
    seed: int
    epoch: int | str
    snapshot: str | None
    sigmas: list[float]
    keep: bool | Literal["path"] = False  # the stochastic steps; "path": all steps
    plan: SamplePlan = field(default_factory=lambda: Chain())
    group: int = 1  # G, for the plans that need it
    count: list[int] = field(default_factory=lambda: [0])  # forwards so far, one for each image and step
    steer: Steer | None = None  # of the plain chain

    def encode(self, texts: Sequence[str]) -> Conditioning:
        with self.policy.adapter(self.snapshot):  # a LoRA may change the text encoders, too
            return self.policy.encode(texts)

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
        from diffrl.continuations import finish

        return finish(self.predict, self.policy.process, x, cond, sigmas, self.spec.guidance_scale, solver, first)

    def begin(self, texts: Sequence[str], members: Sequence[int], same: bool) -> Tensor:
        """(B, C, h, w) of pure noise on the device; `same`: by the prompt's text alone."""
        shape = tuple(self.policy.latent_shape)
        x = initial_noise(shape, texts, members, seed=self.seed, epoch=self.epoch, same_noise=same)
        return x.to(self.policy.device, non_blocking=True)

    def step_noise(self, names: Sequence[tuple[str, int]], width: int) -> Tensor:
        """(B, width, C, h, w): all of an image's step noises in one draw, one generator per image."""
        keys = [(self.seed, self.epoch, *name, "steps") for name in names]
        noise = noise_of((width, *tuple(self.policy.latent_shape)), keys)
        return noise.to(self.policy.device, non_blocking=True)

    def ends(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """t, t_next (B,) of step i, from Python floats: the same arithmetic as in training, where t differs by row."""
        return x.new_full((len(x),), self.sigmas[i]), x.new_full((len(x),), self.sigmas[i + 1])

    def kernel(self, x: Tensor, prediction: Prediction, i: int) -> tuple[Tensor, Tensor]:
        """(mean, std) of the stochastic step i from x."""
        spec = self.spec
        by_step = spec.noise_by_step(self.sigmas)
        t, t_next = self.ends(x, i)
        noise_level = spec.noise if by_step is None else x.new_full((len(x),), by_step[i])
        return sde_kernel(spec.sampler, x, prediction, t, t_next, noise_level, self.sigmas[1], self.policy.process)

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
class SampledBatch:
    """A batch: latents (B, C, h, w); views (B, V, C, h, w), None: the latents are the one view; states (B, w + 1, C, h,
    w) and log_prob (B, w) of the steps that are kept; ends (B, w, C, h, w), see `Trajectory`."""

    latents: Tensor
    views: Tensor | None = None
    states: Tensor | None = None
    log_prob: Tensor | None = None
    ends: Tensor | None = None


class SamplePlan(Protocol):
    """What a rollout draws, of which images, and what it keeps of their paths.

    `apart`: single steps, of each of which both ends are kept (`Trajectory.ends`).
    """

    apart: ClassVar[bool]

    def views(self, spec: SamplerSpec) -> int:
        """V, how many images of a sample are scored."""

    def final(self, spec: SamplerSpec) -> int:
        """The number of the view that stands for the sample."""

    def allocate(self, job: SampleJob, latents: Tensor) -> Trajectory:
        """Storage for the kept steps of a whole epoch, whose latents (n, C, h, w) are given."""

    def draw(self, job: SampleJob, texts: Sequence[str], members: Sequence[int], cond: Conditioning) -> SampledBatch:
        """A batch: image i is member members[i] of the prompt texts[i], cond (B rows)."""

    def forwards(self, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int) -> int:
        """Of the network for a batch of images, each a (prompt number, member of G = `group`)."""


class Chain:
    """One image of each path, one step after the other."""

    apart: ClassVar[bool] = False

    def views(self, spec: SamplerSpec) -> int:
        return 1

    def final(self, spec: SamplerSpec) -> int:
        return 0

    def allocate(self, job: SampleJob, latents: Tensor) -> Trajectory:
        return empty_trajectory(job, latents, job.kept)

    def draw(self, job: SampleJob, texts: Sequence[str], members: Sequence[int], cond: Conditioning) -> SampledBatch:
        noise = job.step_noise(list(zip(texts, members, strict=True)), job.spec.stochastic_steps)
        return chain(job, job.begin(texts, members, job.spec.same_noise), cond, noise)

    def forwards(self, spec: SamplerSpec, start: int, members: Sequence[tuple[int, int]], group: int) -> int:
        from diffrl.continuations import chain_forwards

        return len(members) * chain_forwards(spec, start)


def empty_trajectory(job: SampleJob, latents: Tensor, steps: Sequence[int], apart: bool = False) -> Trajectory:
    """Storage for the whole epoch at once; collecting batches and joining them would need it twice.

    `apart`: the steps do not follow one another, see `Trajectory.ends`.
    """
    n = len(latents)
    number, width = torch.tensor(list(steps)).expand(n, -1), len(steps)  # (n, w)
    schedule, by_step = torch.tensor(job.sigmas), job.spec.noise_by_step(job.sigmas)
    return Trajectory(
        states=latents.new_empty(n, width if apart else width + 1, *latents.shape[1:]),
        t=schedule[number].to(latents.device, non_blocking=True),
        t_next=schedule[number + 1].to(latents.device, non_blocking=True),
        log_prob=latents.new_empty(n, width),
        noise_level=None if by_step is None else torch.tensor(by_step)[number].to(latents.device, non_blocking=True),
        ends=latents.new_empty(n, width, *latents.shape[1:]) if apart else None,
    )


# (x (B, C, h, w) before the stochastic step i, i, its prediction) to another image of each, or None: there is none
View = Callable[[Tensor, int, Prediction], Tensor | None]


def chain(job: SampleJob, x: Tensor, cond: Conditioning, noise: Tensor, view: View | None = None) -> SampledBatch:
    """One step after the other: x (B, C, h, w) from pure noise to t = 0; noise (B, w, C, h, w) of the window."""
    spec, process = job.spec, job.policy.process
    first, width, kept = job.start, spec.stochastic_steps, job.kept
    state: DpmState | None = None
    states = x.new_empty(len(x), len(kept) + 1, *x.shape[1:]) if job.keep else None
    log_prob, views = x.new_zeros(len(x), len(kept)), []
    for i in range(spec.steps):
        if spec.tail is not None and i == first + width:
            from diffrl.continuations import tail_sigmas

            x = job.finish(x, cond, tail_sigmas(job.sigmas, i, spec.tail), TAIL_SOLVER)
            break
        t, t_next = job.ends(x, i)
        prediction = job.predict(x, t, cond, spec.guidance_scale)
        if job.steer is not None:
            x, prediction = job.steer(i, x, prediction)
        if not first <= i < first + width:
            x_next, state = ode_step(spec.sampler, x, prediction, t, t_next, state, process)
            if states is not None and i in kept:
                states[:, i], states[:, i + 1] = x, x_next
            x = x_next
            continue
        if view is not None and (seen := view(x, i, prediction)) is not None:
            views.append(seen)
        mean, std = job.kernel(x, prediction, i)
        x_next = mean + std * noise[:, i - first]
        if states is not None:
            place = i - kept.start
            log_prob[:, place] = gaussian_log_prob(x_next, mean, std)
            states[:, place], states[:, place + 1] = x, x_next
        x = x_next
    return SampledBatch(x, torch.stack([*views, x], 1) if views else None, states, log_prob)
