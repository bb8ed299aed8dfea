"""AC-Flow (arXiv 2510.18072), reconstructed: reward-weighted regression against a critic of the noised image.

Only the abstract and a review's outline were read: a critic V(x_t, t, c) of the final reward, rewards brought to one
scale, clipped advantages, a critic that learns before the policy moves, the weights of ORW-CFM-W2. The form is ours.

symbol     name here      meaning
r~         shaped         (R - mean) / std over all images so far
V          values         the critic's, asked before it learns from the image
A          surprise       clip(r~ - V, +-A_max): what this image is above what was to be expected from x_t
W          weights        exp(A / tau) over its mean in the step, 0 where the reward does not apply
e_theta    phi[:, 0]      mean over dims of (v_theta - v)^2

    L = W e_theta,   penalty beta mean (v_theta - v_ref)^2 (the bound on the Wasserstein distance)
    L_V = mean (V(x_t, t, c) - r~)^2

V is a number of (x_t, t, c) alone. So without clip and penalty it cancels in what every x_t is led to,
E[W v | x_t] / E[W | x_t]: it changes how much a state counts, and by how much the weights spread, and no optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffrl.config.base import Section
from diffrl.methods.acflow import ACFlowSection
from diffrl.methods.acflow.critic import Values
from diffrl.methods.shared.coupling import own_error
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.noising import Noising
from diffrl.objectives.objective import BuildContext, Objective, OptimiserStep
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy

CRITIC_RATE, CRITIC_STEPS = 1e-3, 8  # of the critic's Adam; its steps for each of the policy's
ADV_CLIP = 2.0  # A_max


def scores_themselves(scores: Tensor, groups: Tensor, std: str) -> Tensor:
    """(N, K) as they are."""
    return scores


class Scale:
    """Mean and standard deviation of each column over all scores so far, NaN aside."""

    def __init__(self) -> None:
        self.sums: list[list[float]] = []  # of each column: count, mean, sum of squared deviations

    def see(self, scores: Tensor) -> None:
        """scores (N, columns), NaN where a reward does not apply."""
        self.sums = self.sums or [[0.0, 0.0, 0.0] for _ in range(scores.shape[1])]
        for values, sums in zip(scores.double().unbind(1), self.sums, strict=True):
            known = values[~values.isnan()]
            if not len(known):
                continue
            (count, mean, squares), new = sums, float(known.mean())
            total = count + len(known)
            squares += float((known - new).square().sum()) + (new - mean) ** 2 * count * len(known) / total
            sums[:] = [total, mean + (new - mean) * len(known) / total, squares]

    def __call__(self, scores: Tensor) -> Tensor:
        """(N, columns) shaped scores, NaN where they were."""
        mean = scores.new_tensor([mean for _, mean, _ in self.sums])
        std = scores.new_tensor([(squares / max(count, 1.0)) ** 0.5 for count, _, squares in self.sums])
        return (scores - mean) / std.clamp_min(1e-6)


class ActorCritic(Objective):
    """Rows are those of the forward process, each image with its own t and eps."""

    warmup = 1  # the critic first learns from the untrained model's images

    def __init__(self, keys: ACFlowSection | None = None, *, seed: int = 0, **values: Any) -> None:
        keys = ACFlowSection.of(keys, values)
        super().__init__(beta=keys.beta, noising=Noising.of(keys))
        self.rule = replace(self.rule, estimate=scores_themselves)  # no group: the critic is what is compared with
        self.tau, self.adv_clip = keys.tau, ADV_CLIP
        self.values, self.scale = Values(CRITIC_RATE, seed), Scale()
        self._weights: Tensor | None = None  # (n, T, columns) of the step

    @classmethod
    def of(cls, section: Section, given: BuildContext) -> ActorCritic:
        """With the seed of the critic's first weights."""
        return cls(section, seed=given.config.seed)  # type: ignore[arg-type]

    def advantages(self, scored: ScoredBatch) -> Tensor:
        """(N, columns) shaped scores r~, 0 where a reward does not apply."""
        raw = self.rule(scored)
        self.known = self.rule.known(scored)
        self.scale.see(raw.masked_fill(~self.known, torch.nan))
        return self.scale(raw).nan_to_num(0.0)

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        """W of the step's rows; then the critic learns from their images, whose rewards it has not seen when asked."""
        known = self._local(step, policy)
        weights = known.new_zeros(len(known), self.rows_per_sample(step.rollout), known.shape[1])
        counted = known.new_zeros(known.shape[1])
        for part in step.parts:
            rows = self.rows(step.rollout, step.advantages, part, step.key)
            sample, number = rows.places()
            here = known[sample]
            with torch.no_grad():
                surprise = (rows.advantages - self.values.of(rows)).float()
            self.means.add("acflow/critic_error", surprise.square(), here > 0)
            self.means.add("acflow/clipped", (surprise.abs() > self.adv_clip).float(), here > 0)
            above = surprise.clamp(-self.adv_clip, self.adv_clip) - self.adv_clip  # at most 0: no weight overflows
            weights[sample, number] = (above / self.tau).exp() * here
            counted += here.sum(0)
        total, count = step.reduce(torch.stack([weights.sum((0, 1)), counted])).unbind(0)
        self._weights = weights * (count / total.clamp_min(1e-30))
        self.learn(policy, step)

    def learn(self, policy: Policy, step: OptimiserStep) -> None:
        """`CRITIC_STEPS` of Adam on the step's images, each noised anew at one of its levels."""
        size = max(len(part) for part in step.parts)
        samples, levels = torch.cat(list(step.parts))[:, 0].unique(), self.rows_per_sample(step.rollout)
        known = self._local(step, policy)
        for number in range(CRITIC_STEPS):
            # By the image's number over all processes, so that it is the same on any number of them.
            level = (step.rollout.first + samples + number) % levels
            pairs, key = torch.stack([samples, level], dim=1), (*step.key, "critic", number)

            def losses(pairs: Tensor = pairs, key: tuple[int | str, ...] = key) -> Iterator[Tensor]:
                for part in pairs.split(size):
                    rows = self.rows(step.rollout, step.advantages, part, key)
                    errors = (self.values.of(rows) - rows.advantages).square()
                    yield (errors * known[rows.places()[0]]).mean(1).sum()

            self.values.step(losses(), len(samples), step.reduce)

    def _local(self, step: OptimiserStep, policy: Policy) -> Tensor:
        """(n, columns) 1 where a reward applies, of this process's images, on the policy's device."""
        assert self.known is not None, "advantages() runs before the first step"
        here = slice(step.rollout.first, step.rollout.first + len(step.rollout.member))
        return self.known[here].float().to(policy.device, non_blocking=True)

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        return own_error(policy, rows)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        assert self._weights is not None, "before_step() runs before loss()"
        weights = self._weights[rows.places()]
        self.means.add("acflow/error", phi[:, 0])
        self.means.add("acflow/weight", weights)
        return (weights * phi).sum(0)

    def tensors(self) -> dict[str, Tensor]:
        return self.values.state_dict()

    def load_tensors(self, state: Mapping[str, Tensor]) -> None:
        self.values.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"scale": self.scale.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.scale.sums = [list(map(float, sums)) for sums in state["scale"]]
