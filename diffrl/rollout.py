"""Sampling: prompts in; latents, images and (for GRPO) the stochastic steps out.

Symbols: P prompts, G images per prompt, N = P G images over all processes, n of them on this one, B in a batch, S steps
of which w are stochastic (the SDE window), latents (C, h, w), images (3, H, W).

Every image's noise comes from generators of its own, keyed by (seed, epoch, prompt text, member, purpose). So an image
does not depend on the batch, the rank or the number of processes it is made in, and can be made again alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from diffrl.denoising import EVALUATION, Chain, SampledBatch, SampleJob, SamplePlan, Steer, Trajectory, initial_noise
from diffrl.errors import UserError
from diffrl.forward import Process
from diffrl.samplers import check_process, schedule
from diffrl.sampling import SamplerSpec

if TYPE_CHECKING:
    from diffrl.policy import Conditioning, Policy
    from diffrl.prompts import Prompt

__all__ = [
    "Rollout",
    "SamplerSpec",
    "SamplingError",
    "Trajectory",
    "collect",
    "generate",
    "initial_noise",
    "remake",
]

PROMPTS_AT_ONCE = 64  # encoded together by `generate`: with a T5 one prompt takes 2.7 MB, and test sets have thousands


# (latents (B, C, h, w), their conditioning, prompt text and member of each) to the latents that take their place
Revision = Callable[[Tensor, "Conditioning", Sequence[tuple[str, int]]], Tensor]


class SamplingError(RuntimeError):
    """Sampling gave non-finite latents; the message names prompt and member, and says what to do."""


@dataclass
class Rollout:
    """The images of one epoch that this process made, in global order: image i belongs to prompt i // G.

    prompts, cond: all P prompts of the epoch. prompt_index (n,) int64 is also the id of the group; member (n,) int64 is
    i % G, unless others were asked for; both on the CPU. first, total: global index of the first local image, and N.
    latents (n, C, h, w) fp32 on the policy's device. images (n, 3, H, W) float in [0, 1] on the CPU, or None.
    trajectory: None unless asked for. schedule (S + 1,) float32 on the CPU: the sigmas, the last is 0. forwards: of the
    network for these images, and their scouts: one for each image and step (guidance or not). seed,
    epoch: what the images' noise is keyed by. maps: (n, h, w) on the CPU of each reward that is asked for its map.
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
    forwards: int = 0
    guidance: float = 1.0  # of predictions that train on these images: the rollout's where it is distilled, else none
    seed: int = 0
    epoch: int | str = 0
    maps: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def t_second(self) -> float:
        """The schedule's second sigma (see `flow_sde`)."""
        return float(self.schedule[1])

    def identity(self, i: int) -> tuple[str, int]:
        """(prompt text, member) of local image i: what its random numbers are keyed by."""
        return self.prompts[int(self.prompt_index[i])].text, int(self.member[i])

    def initial_noise(self, samples: Tensor) -> Tensor:
        """(b, C, h, w) on the CPU: the noise that local images (b,) began as, in a rollout without a plan."""
        texts, members = zip(*(self.identity(int(i)) for i in samples), strict=True)
        shape, same = tuple(self.latents.shape[1:]), self.spec.same_noise
        return initial_noise(shape, texts, members, seed=self.seed, epoch=self.epoch, same_noise=same)


def collect(
    policy: Policy,
    prompts: Sequence[Prompt],
    spec: SamplerSpec,
    *,
    seed: int,
    epoch: int | str,
    group_size: int,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    snapshot: str | None = "default",
    on_batch: Callable[[Tensor, slice], None] | None = None,
    keep_trajectory: bool | Literal["path"] = False,
    keep_images: bool = True,
    plan: SamplePlan | None = None,
    on_view: Callable[[Tensor, slice, int], None] | None = None,
    members: Tensor | None = None,
) -> Rollout:
    """Sample G = `group_size` images of each of P distinct prompts, `batch_size` in a forward; this process its share.

    Raises UserError if the sampler does not fit the model, has no stochastic step to keep or a prompt comes twice, and
    SamplingError for non-finite latents, naming prompt and member.

    Args:
        rank, world: this process makes images [rank N / world, (rank + 1) N / world) of the prompt-major order.
        snapshot: the adapter that samples ("default", "old", ...); None is the pretrained model.
        on_batch: called after each decode with images (B, 3, H, W) on the policy's device and their slice of the local
            images, for example to score them while sampling goes on; outside of no_grad and of the snapshot.
        keep_trajectory: store the stochastic steps; "path": all steps, also a deterministic sampler's.
        keep_images: the images on the CPU.
        plan: what else than one image per trajectory is drawn (`SamplePlan`); None: nothing.
        on_view: called as `on_batch` for every view that is not the final one, with its number; before `on_batch`.
        members: (P, G) int64, which images of each prompt these are; None: 0 to G - 1. Never with a plan.
    """
    job = _job(policy, spec, seed, epoch, snapshot, keep_trajectory, plan, group_size)
    final = 0 if plan is None else plan.final(spec)
    rollout = _empty(job, prompts, rank, world)
    if members is not None:
        rollout.member = members.flatten()[rollout.first : rollout.first + len(rollout.member)]
    owners = [prompts[i].text for i in rollout.prompt_index.tolist()]
    pictures: list[Tensor] = []
    for part in _batches(len(owners), batch_size):
        own = rollout.cond.select(rollout.prompt_index[part])
        drawn = _sample(job, own, owners[part], rollout.member[part].tolist())
        _keep(rollout, drawn, part)
        for view in range(0 if drawn.views is None else drawn.views.shape[1]):
            if on_view is not None and view != final:
                on_view(_decoded(policy, drawn.views[:, view]), part, view)  # type: ignore[index]
        images = _decoded(policy, drawn.latents)
        if on_batch is not None:
            on_batch(images, part)
        if keep_images:
            pictures.append(images.cpu())
    rollout.images, rollout.forwards = torch.cat(pictures) if keep_images else None, job.count[0]
    return rollout


def _empty(job: SampleJob, prompts: Sequence[Prompt], rank: int, world: int) -> Rollout:
    """The rollout before its images are drawn."""
    policy, spec, texts = job.policy, job.spec, [p.text for p in prompts]
    prompt_index, member, local = _share(texts, job.group, rank, world)
    assert len(member) > 0, "more processes than images"
    latents = torch.empty(len(member), *policy.latent_shape, device=policy.device)
    with policy.adapter(job.snapshot):  # a LoRA may change the text encoders, too
        cond = own_texts(policy, texts, prompt_index)
    return Rollout(
        prompts=list(prompts),
        prompt_index=prompt_index,
        member=member,
        first=local.start,
        total=len(prompts) * job.group,
        latents=latents,
        images=None,
        cond=cond,
        trajectory=job.plan.allocate(job, latents) if job.keep else None,
        schedule=torch.tensor(job.sigmas),
        process=policy.process,
        spec=spec,
        guidance=spec.guidance_scale if policy.distilled_guidance else 1.0,
        seed=job.seed,
        epoch=job.epoch,
    )


def own_texts(policy: Policy, texts: Sequence[str], owners: Tensor) -> Conditioning:
    """Of an epoch's texts those of this process's images, which stand together; `owners` (n,) are their numbers."""
    first = int(owners.min())
    return replace(policy.encode(texts[first : int(owners.max()) + 1]), first=first)


def _keep(rollout: Rollout, drawn: SampledBatch, part: slice) -> None:
    """A batch's latents and steps."""
    rollout.latents[part], trajectory = drawn.latents, rollout.trajectory
    if trajectory is not None and drawn.states is not None and drawn.log_prob is not None:
        trajectory.states[part], trajectory.log_prob[part] = drawn.states, drawn.log_prob
        if trajectory.ends is not None and drawn.ends is not None:
            trajectory.ends[part] = drawn.ends


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
    revise: Revision | None = None,
    epoch: int | str = EVALUATION,
    first_member: int = 0,
    steer: Steer | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images for evaluation, batch by batch: (global indices (B,) int64, images (B, 3, H, W) float in [0, 1]).

    Image i belongs to prompt i // per_prompt. The noise depends on seed, prompt and member only, so it is the same in
    every epoch, and it is shared with no rollout, unless `epoch` names one. `revise` makes of a batch's latents those
    that are decoded. A prompt's images are its members from `first_member` on. `steer` sees every step of a batch
    (`diffrl.denoising`). Raises what `collect` raises.
    """
    job = replace(_job(policy, spec, seed, epoch, snapshot), steer=steer)
    prompt_index, member, local = _plan([p.text for p in prompts], per_prompt, rank, world)
    member += first_member
    if local.start == local.stop:  # more processes than images
        return
    block = PROMPTS_AT_ONCE * per_prompt
    for start in range(local.start - local.start % block, local.stop, block):
        here = range(max(start, local.start), min(start + block, local.stop))
        first, last = here[0] // per_prompt, here[-1] // per_prompt
        cond = job.encode([p.text for p in prompts[first : last + 1]])
        for part in _batches(len(here), batch_size):
            indices = torch.tensor(here[part])
            owners = prompt_index[indices]
            texts = [prompts[i].text for i in owners.tolist()]
            own, members = cond.select(owners - first), member[indices].tolist()
            latents = _sample(job, own, texts, members).latents
            if revise is not None:
                latents = revise(latents, own, list(zip(texts, members, strict=True)))
            yield indices, _decoded(policy, latents)


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
    latents = _sample(job, job.encode([prompt]), [prompt], [member]).latents
    return latents, _decoded(policy, latents)


def _job(
    policy: Policy,
    spec: SamplerSpec,
    seed: int,
    epoch: int | str,
    snapshot: str | None,
    keep: bool | Literal["path"] = False,
    plan: SamplePlan | None = None,
    group: int = 1,
) -> SampleJob:
    check_process(spec.sampler, policy.process)
    if keep is True and spec.stochastic_steps == 0:
        text = f'"{spec.sampler}" at noise level {spec.noise_level} and {spec.steps} steps has no stochastic step'
        raise UserError(f"rollout.sampler: {text} to train on")
    sigmas = schedule(policy, spec).tolist()
    return SampleJob(policy, spec, seed, epoch, snapshot, sigmas, keep, plan or Chain(), group)


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


@torch.no_grad()
def _decoded(policy: Policy, latents: Tensor) -> Tensor:
    return policy.decode(latents)


@torch.no_grad()
def _sample(job: SampleJob, cond: Conditioning, texts: Sequence[str], members: Sequence[int]) -> SampledBatch:
    """One batch from noise to latents and kept steps. no_grad, not inference mode: autograd uses them later."""
    with job.policy.adapter(job.snapshot):
        drawn = job.plan.draw(job, texts, members, cond)
    everything = drawn.latents if drawn.views is None else drawn.views
    finite = everything.isfinite().flatten(1).all(1).tolist()
    if not all(finite):
        i, more = finite.index(False), finite.count(False) - 1
        raise SamplingError(
            f'sampling gave non-finite latents for prompt "{texts[i]}", member {members[i]} and {more} more of its '
            f"batch (sampler {job.spec.sampler}, seed {job.seed}, epoch {job.epoch}): lower optimise.learning_rate, or "
            f"set optimise.precision to fp32"
        )
    return drawn
