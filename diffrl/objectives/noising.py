"""How clean images become rows: they are noised again, at levels of their own.

Symbols: n local samples, T training rows per sample, b rows of a micro-batch, K rewards; latents (b, C, h, w).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diffrl.config.methods import ForwardProcess, asked, noisiest
from diffrl.forward import expand
from diffrl.objectives.rows import Names, Rows, TimestepSampling, row_advantages, row_sigmas
from diffrl.rollout import Rollout
from diffrl.seeds import noise


@dataclass
class Noising:
    """Rows of the forward process: the generated images, noised again at some levels of their own.

    Args:
        timesteps: T; None: as many as there are usable levels.
        sampling: the schedule's own levels without repeats, or random draws from (0, 1); "logit_normal_3" moves them
            towards noise by SD3's shift of 3, as Flow-GRPO's DPO, SFT and RWR draw them.
        fraction: only this share of the schedule's levels, the noisiest.
        group_level, group_noise: the members of a prompt group share a row's level; its noise, too.
        path: the noise of a row is not drawn: see `path_noise`.
    """

    timesteps: int | None = None
    sampling: TimestepSampling = "schedule"
    fraction: float = 1.0
    group_level: bool = False
    group_noise: bool = False
    path: bool = False

    def count(self, rollout: Rollout) -> int:
        """T: rows per sample."""
        return self.timesteps or self.levels(rollout)

    def levels(self, rollout: Rollout) -> int:
        """How many of the schedule's levels may be drawn."""
        return noisiest(len(rollout.schedule) - 1, self.fraction)

    @classmethod
    def of(cls, keys: ForwardProcess, **more: bool) -> Noising:
        """By the keys of an objective's section; "schedule" where it has no choice."""
        sampling: TimestepSampling = getattr(keys, "timestep_sampling", "schedule")
        count, share = asked(keys.timesteps)
        return cls(count, sampling, share, **more)

    def rows(
        self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...], on_policy: bool
    ) -> Rows:
        """The rows of `pairs` (b, 2); what is random in them is keyed by `key` and the image, or its prompt."""
        members: Names = [(*key, *rollout.identity(int(i))) for i in pairs[:, 0]]
        prompts: Names = [name[:-1] for name in members]
        names = prompts if self.group_level else members
        t = row_sigmas(rollout, names, pairs[:, 1], self.count(rollout), self.sampling, self.levels(rollout))
        eps = path_noise(rollout, pairs[:, 0], t) if self.path else None
        return noised_rows(rollout, advantages, pairs, t, prompts if self.group_noise else members, on_policy, eps)


def path_noise(rollout: Rollout, sample: Tensor, t: Tensor) -> Tensor:
    """(b, C, h, w): the noise that brings an image to the state x_t that its ODE path had at the level t (b,) of the
    schedule, `eps = (x_t - alpha_t x0) / sigma_t` (InPO, arXiv:2503.18454). Its inversion gives x_t to the order of the
    solver; here the path is stored, and exact for the model's own images. At the first level it is the initial noise.
    """
    assert rollout.trajectory is not None, "optimise.noise: path keeps the path"
    step = (t[:, None] == rollout.schedule[:-1]).int().argmax(1)
    on = sample.to(rollout.latents.device, non_blocking=True)
    x_t, x0 = rollout.trajectory.x[on, step.to(on.device, non_blocking=True)], rollout.latents[on]
    t, process = t.to(x0.device, non_blocking=True), rollout.process
    return (x_t - expand(process.alpha(t), x0) * x0) / expand(process.sigma(t), x0)


def noised_rows(
    rollout: Rollout,
    advantages: Tensor,
    pairs: Tensor,
    t: Tensor,
    names: Names,
    on_policy: bool,
    eps: Tensor | None = None,
) -> Rows:
    """The images of `pairs` (b, 2), noised to the levels t (b,) with noise keyed by `names` and the row number.

    `eps`: (b, C, h, w), in the place of that noise.
    """
    sample, number = pairs[:, 0], pairs[:, 1]
    device = rollout.latents.device
    # Nothing here waits for the device: what is copied there is staged at once, and the host goes on.
    x0, t = rollout.latents[sample.to(device, non_blocking=True)], t.to(device, non_blocking=True)
    if eps is None:
        eps = noise(tuple(x0.shape[1:]), [(*name, "eps", int(j)) for name, j in zip(names, number, strict=True)])
    eps = eps.to(device, non_blocking=True)
    return Rows(
        x0=x0,
        x_t=rollout.process.add_noise(x0, eps, t),
        t=t,
        cond=rollout.cond.select(rollout.prompt_index[sample]),
        advantages=row_advantages(advantages, sample, number).to(device, non_blocking=True),
        groups=rollout.prompt_index[sample],
        on_policy=on_policy,
        guidance=rollout.guidance,
        pairs=pairs,
        eps=eps,
    )
