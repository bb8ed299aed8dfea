"""On-policy distillation of several teachers (DiffusionOPD, arXiv 2605.15055; Flow-OPD, 2605.08063).

The student samples; at the states of its own paths the teacher of the prompt says what the step should have been.

symbol      name here     meaning
v_S         theta         velocity of the student, with the trained LoRA
v_m         targets       velocity of teacher m, without gradient
m(c)        owners        the teacher of the prompt c, by the source that c is from
w(t)        weight        of the target: 1; dt^2 / 2; (d mean / dv)^2 / (2 std^2)
e_m         phi           w(t) mean over dims of (v_S - v_m)^2
l_m         strengths     weight of teacher m on the rows of all prompts (Flow-OPD's anchor)

    L = e_m(c) + sum over m of l_m e_m

A sampler's mean is linear in v, so w(t) mean (v_S - v_m)^2 of target "kl" is the KL divergence of the two steps, mean
over dims. Rewards do not enter; they are scored and logged. The released code of Flow-OPD has the same form in effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.config.base import Section
from diffrl.config.sections import Rollout as Drawn
from diffrl.forward import Process
from diffrl.methods.opd import OPDSection, Teacher
from diffrl.methods.opd.teachers import load_teachers
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.objective import BuildContext, Cost, Objective
from diffrl.objectives.rows import Rows, row_advantages
from diffrl.policy import Policy
from diffrl.rollout import Rollout, SamplerSpec
from diffrl.samplers import NoiseLevel, sde_kernel
from diffrl.seeds import noise

NO_TEACHER = -1  # no teacher of its own


def slot(name: str, teacher: Teacher) -> str | None:
    """The LoRA that a teacher predicts with; None is the pretrained model."""
    return None if teacher.lora is None else f"teacher_{name}"


def target_weight(
    target: str, spec: SamplerSpec, process: Process, t: Tensor, t_next: Tensor, a: NoiseLevel, t_second: float
) -> Tensor:
    """(b,) w of steps from t to t_next (b,): what mean (v_S - v_m)^2 is weighted with.

    "step": half the squared slope of the ODE's step in v, dt^2 / 2 for flow matching.
    """
    if target == "v":
        return torch.ones_like(t)
    if target == "step":
        slope = process.sigma(t_next) * process.alpha(t) - process.alpha(t_next) * process.sigma(t)
        return slope.square() / 2
    zero = t.new_zeros(len(t), 1, 1, 1)
    unit = process.from_velocity(zero, zero + 1, t)  # the mean is linear in v, and 0 here for x = v = 0
    mean, std = sde_kernel(spec.sampler, zero, unit, t, t_next, a, t_second, process)
    return (mean.square() / (2 * std.square())).flatten()


@dataclass(kw_only=True)
class TaughtRows(Rows):
    """States of the student's path."""

    weight: Tensor  # (b,) of the distance from a teacher
    owner: Tensor  # (b,) int64 on the CPU: the row's teacher, or NO_TEACHER


class OPD(Objective):
    """Rows are the states of the student's paths, sorted by teacher, so that few micro-batches have two.

    Args:
        taught: {source of prompts: its teacher's name}; empty: all teach everywhere.
        shares: {source: its share of the prompts}, for estimates.
    """

    selects = True

    def __init__(
        self,
        spec: SamplerSpec,
        keys: OPDSection | None = None,
        *,
        taught: Mapping[str, str],
        shares: Mapping[str, float],
        **values: Any,
    ) -> None:
        super().__init__()
        keys = OPDSection.of(keys, values)
        teachers, target = keys.teachers, keys.target
        self.spec, self.teachers, self.target, self.timesteps = spec, teachers, target, keys.timesteps
        self.guidance_scale = spec.guidance_scale
        self.keep_trajectory = True if target == "kl" else "path"
        number = {name: index for index, name in enumerate(teachers)}
        self.owner_of = {source: number[name] for source, name in taught.items()}
        self.shares = {source: share / sum(shares.values()) for source, share in shares.items()}
        self.everywhere = [index for index, one in enumerate(teachers.values()) if one.everywhere]
        self.strengths = [1.0, *(one.everywhere for one in teachers.values() if one.everywhere)]
        self.slots = [slot(name, one) for name, one in teachers.items()]
        self._config: Config | None = None

    @classmethod
    def of(cls, section: Section, given: BuildContext) -> OPD:
        """With who teaches which source, and the sources' shares; how the student begins is the run's matter."""
        assert isinstance(section, OPDSection), "it is built from its own section"
        train = given.config.prompts.train
        sources = {train: 1.0} if isinstance(train, str) else dict(train)
        taught = {source: name for name, one in section.teachers.items() for source in one.taught(sources)}
        made = cls(given.spec, section, taught=taught, shares=sources)
        made._config = given.config
        return made

    def prepare(self, policy: Policy) -> None:
        """Read the teachers; one that is built without a config finds them in the policy."""
        if self._config is not None:
            load_teachers(self._config, policy, self.slots)

    def rows_per_sample(self, rollout: Rollout) -> int:
        assert rollout.trajectory is not None, "OPD needs the path's states"
        return self.timesteps or rollout.trajectory.t.shape[1]

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        found = []
        for index, teacher in enumerate(self.teachers.values()):
            mine = sum(share for source, share in self.shares.items() if self.owner_of.get(source) == index)
            found.append((1.0 if teacher.everywhere else mine, self._guidance(teacher)))
        return Cost(guided=found, loras=sum(name is not None for name in self.slots))

    def _guidance(self, teacher: Teacher) -> float:
        return self.spec.guidance_scale if teacher.guidance is None else teacher.guidance

    def owners(self, rollout: Rollout, groups: Tensor) -> Tensor:
        """(b,) int64: the teacher of each group's prompt, or NO_TEACHER."""
        return torch.tensor([self.owner_of.get(prompt.source, NO_TEACHER) for prompt in rollout.prompts])[groups]

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        order = self.owners(rollout, rollout.prompt_index[samples])
        own = [samples[order == index] for index in sorted(set(order.tolist()))]
        return torch.cat([sample_pairs(part, self.rows_per_sample(rollout)) for part in own])

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> TaughtRows:
        path = rollout.trajectory
        assert path is not None, "OPD needs the path's states"
        sample, number = pairs[:, 0], pairs[:, 1]
        if self.rows_per_sample(rollout) < (stored := path.t.shape[1]):
            names = [(*key, *rollout.identity(int(i)), "timesteps") for i in sample]
            number = noise((stored,), names).argsort(dim=1).gather(1, number[:, None]).squeeze(1)
        i, j = (index.to(path.t.device, non_blocking=True) for index in (sample, number))
        t, t_next = path.t[i, j], path.t_next[i, j]
        a = self.spec.noise if path.noise_level is None else path.noise_level[i, j]
        groups = rollout.prompt_index[sample]
        return TaughtRows(
            x0=rollout.latents[i],
            x_t=path.x[i, j],
            t=t,
            cond=rollout.cond.select(groups),
            advantages=row_advantages(advantages, sample, number).to(t.device, non_blocking=True),
            groups=groups,
            pairs=pairs,
            on_policy=self.on_policy,
            guidance=self.spec.guidance_scale,
            weight=target_weight(self.target, self.spec, rollout.process, t, t_next, a, rollout.t_second),
            owner=self.owners(rollout, groups),
        )

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1 + number of anchors): e of the row's own teacher, and of those that teach everywhere."""
        assert isinstance(rows, TaughtRows), "rows() makes them"
        if self.means.pausing:  # rows that count as nothing have no teacher
            rows.owner = torch.full_like(rows.owner, NO_TEACHER)
        targets = self._targets(policy, rows)  # before the student's graph is there
        rows.prediction = theta = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        errors = torch.stack([(theta.v - target).square().flatten(1).mean(1) for target in targets], dim=1)
        owned = rows.owner.to(theta.v.device, non_blocking=True)
        for index, name in enumerate(self.teachers):
            if index in self.owner_of.values():
                self.means.add(f"opd/{name}", errors[:, 0], where=owned == index)
        for column, index in enumerate(self.everywhere, start=1):
            self.means.add(f"opd/{list(self.teachers)[index]}/everywhere", errors[:, column])
        own = torch.where(owned == NO_TEACHER, 0.0, errors[:, 0])
        return torch.cat([own[:, None], errors[:, 1:]], dim=1) * rows.weight[:, None]

    @torch.no_grad()
    def _targets(self, policy: Policy, rows: TaughtRows) -> list[Tensor]:
        """Velocities (b, C, h, w): of each row's own teacher (0: it has none), and of those that teach everywhere."""
        own, everywhere = torch.zeros_like(rows.x_t, dtype=torch.float32), []
        with policy.uneven_forwards():  # ranks may run different numbers of forwards
            for index, teacher in enumerate(self.teachers.values()):
                here = (rows.owner == index).nonzero().flatten()
                part = rows if index in self.everywhere else rows.select(here)
                if not len(part.t):
                    continue
                with policy.adapter(self.slots[index]):
                    v = policy.predict(part.x_t, part.t, part.cond, self._guidance(teacher)).v
                on = here.to(v.device, non_blocking=True)
                own[on] = v[on] if index in self.everywhere else v
                if index in self.everywhere:
                    everywhere.append(v)
        return [own, *everywhere]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        return self.plain(phi, rows.advantages)

    def plain(self, phi: Tensor, advantages: Tensor) -> Tensor:
        """(1,) summed over the rows: the equation, from e (b, 1 + number of anchors)."""
        return (phi @ phi.new_tensor(self.strengths)).sum(0, keepdim=True)
