"""Sampling: prompts in; latents, images and (for GRPO) the stochastic steps out.

Symbols: P prompts, G images per prompt, N = P G images over all processes, n of them on this one, B in a batch, S steps
of which w are stochastic (the SDE window), latents (C, h, w), images (3, H, W).

Every image's noise comes from generators of its own, keyed by (seed, epoch, prompt text, member, purpose). So an image
does not depend on the batch, the rank or the number of processes it is made in, and can be made again alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffrl import seeds
from diffrl.errors import UserError
from diffrl.forward import Process
from diffrl.samplers import DpmState, SamplerSpec, gaussian_log_prob, ode_step, sampler_info, sde_kernel

if TYPE_CHECKING:
    from diffrl.policy import Conditioning, Policy
    from diffrl.prompts import Prompt

__all__ = ["Rollout", "SamplerSpec", "SamplingError", "Trajectory", "collect", "generate", "initial_noise", "remake"]

EVALUATION = "evaluation"  # takes the epoch's place in the keys, so that no training image shares noise with these
PROMPTS_AT_ONCE = 64  # encoded together by `generate`: with a T5 one prompt takes 2.7 MB, and test sets have thousands


class SamplingError(RuntimeError):
    """Sampling gave non-finite latents; the message names prompt and member, and says what to do."""


@dataclass
class Trajectory:
    """The w stochastic steps of n images, fp32 on the policy's device. `x` and `x_next` are views of `states`.

    states (n, w + 1, C, h, w): before each step of the window, and after the last one. t, t_next (w,). log_prob (n, w):
    of x_next under the sampling policy, averaged over the latent dimensions.
    """

    states: Tensor
    t: Tensor
    t_next: Tensor
    log_prob: Tensor

    @property
    def x(self) -> Tensor:
        """(n, w, C, h, w), the state before each stochastic step."""
        return self.states[:, :-1]

    @property
    def x_next(self) -> Tensor:
        """(n, w, C, h, w), the state after each stochastic step."""
        return self.states[:, 1:]


@dataclass
class Rollout:
    """The images of one epoch that this process made, in global order: image i belongs to prompt i // G.

    prompts, cond: all P prompts of the epoch. prompt_index (n,) int64 is also the id of the group; member (n,) int64 is
    i % G; both on the CPU. first, total: global index of the first local image, and N. latents (n, C, h, w) fp32 on the
    policy's device. images (n, 3, H, W) float in [0, 1] on the CPU, or None. trajectory: None unless asked for.
    schedule (S + 1,) float32 on the CPU: the noise levels, the last is 0.
    """

    prompts: list[Prompt]
    prompt_index: Tensor
    member: Tensor
    first: int
    total: int
    latents: Tensor
    images: Tensor | None
    cond: Conditioning
    trajectory: Trajectory | None
    schedule: Tensor
    process: Process
    spec: SamplerSpec
    guidance: float = 1.0  # of predictions that train on these images: the rollout's where it is distilled, else none

    @property
    def t_second(self) -> float:
        """The schedule's second noise level (see `flow_sde`)."""
        return float(self.schedule[1])

    def identity(self, i: int) -> tuple[str, int]:
        """(prompt text, member) of local image i: what its random numbers are keyed by."""
        return self.prompts[int(self.prompt_index[i])].text, int(self.member[i])


@dataclass(frozen=True)
class _Job:
    """What all batches of one call share; `levels` are Python floats, so the step loop never waits for the device."""

    policy: Policy
    spec: SamplerSpec
    seed: int
    epoch: int | str
    snapshot: str | None
    levels: list[float]
    keep: bool = False

    @property
    def steps(self) -> range:
        return self.spec.stochastic_steps(self.seed, self.epoch)


@dataclass
class _Steps:
    """The stochastic steps of a batch: states (B, w + 1, C, h, w), log_prob (B, w)."""

    states: Tensor
    log_prob: Tensor


def collect(
    policy: Policy,
    prompts: Sequence[Prompt],
    spec: SamplerSpec,
    *,
    seed: int,
    epoch: int,
    group_size: int,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    snapshot: str | None = "default",
    on_batch: Callable[[Tensor, slice], None] | None = None,
    keep_trajectory: bool = False,
    keep_images: bool = True,
) -> Rollout:
    """Sample G = `group_size` images of each of P distinct prompts, `batch_size` in a forward; this process its share.

    Raises UserError if the sampler does not fit the model, has no stochastic step to keep or a prompt comes twice, and
    SamplingError for non-finite latents, naming prompt and member.

    Args:
        rank, world: this process makes images [rank N / world, (rank + 1) N / world) of the prompt-major order.
        snapshot: the adapter that samples ("default", "old", ...); None is the pretrained model.
        on_batch: called after each decode with images (B, 3, H, W) on the policy's device and their slice of the local
            images, for example to score them while sampling goes on; outside of no_grad and of the snapshot.
        keep_trajectory, keep_images: store the stochastic steps (GRPO alone needs them), the images on the CPU.
    """
    job = _job(policy, spec, seed, epoch, snapshot, keep_trajectory)
    texts = [p.text for p in prompts]
    prompt_index, member, local = _share(texts, group_size, rank, world)
    assert len(member) > 0, "more processes than images"
    cond = policy.encode(texts)
    latents = torch.empty(len(member), *policy.latent_shape, device=policy.device)
    trajectory = _empty_trajectory(job, latents) if keep_trajectory else None
    pictures: list[Tensor] = []
    for part in _batches(len(member), batch_size):
        names = [texts[i] for i in prompt_index[part].tolist()]
        latents[part], images, steps = _sample(job, cond.select(prompt_index[part]), names, member[part].tolist())
        if trajectory is not None and steps is not None:
            trajectory.states[part], trajectory.log_prob[part] = steps.states, steps.log_prob
        if on_batch is not None:
            on_batch(images, part)
        if keep_images:
            pictures.append(images.cpu())
    return Rollout(
        prompts=list(prompts),
        prompt_index=prompt_index,
        member=member,
        first=local.start,
        total=len(prompts) * group_size,
        latents=latents,
        images=torch.cat(pictures) if keep_images else None,
        cond=cond,
        trajectory=trajectory,
        schedule=torch.tensor(job.levels),
        process=policy.process,
        spec=spec,
        guidance=spec.guidance if policy.distilled_guidance else 1.0,
    )


def generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    spec: SamplerSpec,
    *,
    seed: int,
    per_prompt: int,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    snapshot: str | None = "default",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images for evaluation, batch by batch: (global indices (B,) int64, images (B, 3, H, W) float in [0, 1]).

    Image i belongs to prompt i // per_prompt. The noise depends on seed, prompt and member only, so it is the same in
    every epoch, and it is shared with no rollout. Raises what `collect` raises.
    """
    job = _job(policy, spec, seed, EVALUATION, snapshot)
    prompt_index, member, local = _plan([p.text for p in prompts], per_prompt, rank, world)
    if local.start == local.stop:  # more processes than images
        return
    block = PROMPTS_AT_ONCE * per_prompt
    for start in range(local.start - local.start % block, local.stop, block):
        here = range(max(start, local.start), min(start + block, local.stop))
        first, last = here[0] // per_prompt, here[-1] // per_prompt
        cond = policy.encode([p.text for p in prompts[first : last + 1]])
        for part in _batches(len(here), batch_size):
            indices = torch.tensor(here[part])
            owners = prompt_index[indices]
            texts = [prompts[i].text for i in owners.tolist()]
            yield indices, _sample(job, cond.select(owners - first), texts, member[indices].tolist())[1]


def remake(
    policy: Policy,
    spec: SamplerSpec,
    prompt: str,
    member: int,
    *,
    seed: int,
    epoch: int | str = EVALUATION,
    snapshot: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """One image of a rollout (or of an evaluation) again, alone: latents (1, C, h, w), image (1, 3, H, W).

    The noise is bit-identical; the picture is the same up to the rounding that differs with the batch size.
    """
    job = _job(policy, spec, seed, epoch, snapshot)
    latents, image, _ = _sample(job, policy.encode([prompt]), [prompt], [member])
    return latents, image


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
    return seeds.noise(tuple(shape), [(seed, epoch, *owner, "initial") for owner in whose])


def _job(
    policy: Policy, spec: SamplerSpec, seed: int, epoch: int | str, snapshot: str | None, keep: bool = False
) -> _Job:
    sampler_info(spec.name, policy.process)
    if keep and spec.width == 0:
        text = f'"{spec.name}" at noise level {spec.strength} and {spec.steps} steps has no stochastic step to train on'
        raise UserError(f"rollout.sampler: {text}")
    return _Job(policy, spec, seed, epoch, snapshot, policy.timesteps(spec.steps).tolist(), keep)


def _plan(texts: Sequence[str], group: int, rank: int, world: int) -> tuple[Tensor, Tensor, slice]:
    """prompt_index (N,) and member (N,) of all images, prompt-major, and this rank's contiguous slice of them."""
    text, times = Counter(texts).most_common(1)[0]
    if times > 1:
        raise UserError(f'prompts: "{text}" comes {times} times; its images would be the same each time')
    total = len(texts) * group
    prompt_index = torch.arange(len(texts)).repeat_interleave(group)
    return (
        prompt_index,
        torch.arange(group).repeat(len(texts)),
        slice(rank * total // world, (rank + 1) * total // world),
    )


def _share(texts: Sequence[str], group: int, rank: int, world: int) -> tuple[Tensor, Tensor, slice]:
    """`_plan` with prompt_index and member of this rank's images alone, (n,) each."""
    prompt_index, member, local = _plan(texts, group, rank, world)
    return prompt_index[local], member[local], local


def _batches(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _empty_trajectory(job: _Job, latents: Tensor) -> Trajectory:
    """Storage for the whole epoch at once; collecting batches and joining them would need it twice."""
    steps = job.steps
    levels = torch.tensor(job.levels, device=latents.device)
    return Trajectory(
        states=latents.new_empty(len(latents), len(steps) + 1, *latents.shape[1:]),
        t=levels[steps.start : steps.stop],
        t_next=levels[steps.start + 1 : steps.stop + 1],
        log_prob=latents.new_empty(len(latents), len(steps)),
    )


@torch.no_grad()
def _sample(
    job: _Job, cond: Conditioning, texts: Sequence[str], members: Sequence[int]
) -> tuple[Tensor, Tensor, _Steps | None]:
    """One batch from noise to latents, images and kept steps. no_grad, not inference mode: autograd uses them later."""
    policy, spec = job.policy, job.spec
    shape = tuple(policy.latent_shape)
    x = initial_noise(shape, texts, members, seed=job.seed, epoch=job.epoch, same_noise=spec.same_noise)
    # all of an image's step noises in one draw: one generator per image, not one per step
    keys = [(job.seed, job.epoch, text, m, "steps") for text, m in zip(texts, members, strict=True)]
    noise = seeds.noise((spec.width, *shape), keys)
    with policy.using(job.snapshot):
        latents, steps = _denoise(job, x.to(policy.device), cond, noise.to(policy.device))
    finite = latents.isfinite().flatten(1).all(1).tolist()
    if not all(finite):
        i, more = finite.index(False), finite.count(False) - 1
        raise SamplingError(
            f'sampling gave non-finite latents for prompt "{texts[i]}", member {members[i]} and {more} more of its '
            f"batch (sampler {spec.name}, seed {job.seed}, epoch {job.epoch}): lower optimise.learning_rate, or set "
            f"optimise.precision to fp32"
        )
    return latents, policy.decode(latents), steps


def _denoise(job: _Job, x: Tensor, cond: Conditioning, noise: Tensor) -> tuple[Tensor, _Steps | None]:
    """The one sampling loop: x (B, C, h, w) from pure noise to t = 0; noise (B, w, C, h, w) of the window."""
    policy, spec, levels, window = job.policy, job.spec, job.levels, job.steps
    state: DpmState | None = None
    states: list[Tensor] = []
    log_probs: list[Tensor] = []
    for i in range(spec.steps):
        # (B,) tensors filled from Python floats: the same arithmetic as in training, where t differs from row to row
        t, t_next = x.new_full((len(x),), levels[i]), x.new_full((len(x),), levels[i + 1])
        prediction = policy.predict(x, t, cond, spec.guidance)
        if i not in window:
            x, state = ode_step(spec.name, x, prediction, t, t_next, state, policy.process)
            continue
        mean, std = sde_kernel(spec.name, x, prediction, t, t_next, spec.strength, levels[1], policy.process)
        x_next = mean + std * noise[:, i - window.start]
        if job.keep:
            states.append(x)
            log_probs.append(gaussian_log_prob(x_next, mean, std))
        x = x_next
        if job.keep and i == window[-1]:
            states.append(x)
    return x, _Steps(torch.stack(states, 1), torch.stack(log_probs, 1)) if job.keep else None
