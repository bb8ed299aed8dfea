"""Flow-GRPO: policy gradients on the steps of a stochastic sampler (arXiv 2505.05470, 2505.07818).

symbol            name here        meaning
log p_theta       phi[:, 0]        log-probability of the stored step, mean over latent dimensions
ratio             ratio            exp(log p_theta - log p_sampled)
s sqrt(-dt)       std              standard deviation of the step
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffrl.advantages import Std
from diffrl.forward import Prediction
from diffrl.policy import Policy
from diffrl.rollout import Rollout, SamplerSpec
from diffrl.samplers import gaussian_log_prob, sde_kernel
from diffrl.seeds import noise
from diffrl.trainers.algorithm import AdvantageRule, Rows, RunningMeans, Scored, Step
from diffrl.trainers.nft import kl_penalty, reference_prediction


def grpo_loss(log_prob: Tensor, sampled: Tensor, advantages: Tensor, clip: float, adv_clip: float) -> Tensor:
    """(B, K) losses `-min(ratio A, clip(ratio, 1 - e, 1 + e) A)`; log_prob and sampled (B,), advantages (B, K)."""
    ratio = (log_prob - sampled).exp()[:, None]
    a = advantages.clamp(-adv_clip, adv_clip)
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)


class GRPO:
    """The objective of Flow-GRPO on the loop's seams."""

    name = "grpo"
    samples_from = "default"
    snapshots: tuple[str, ...] = ()
    reference: str | None = None
    keep_trajectory = True
    whole_groups = False

    def __init__(
        self,
        spec: SamplerSpec,
        *,
        clip: float = 1e-4,
        adv_clip: float = 5.0,
        beta: float = 0.0,
        timesteps: int | None = None,
        advantage_std: Std = "group",
    ) -> None:
        self.spec, self.clip, self.adv_clip, self.beta, self.timesteps = spec, clip, adv_clip, beta, timesteps
        self.moved = False  # has the LoRA moved since the rollout was drawn?
        self.rule = AdvantageRule(advantage_std)
        self._means = RunningMeans()

    def advantages(self, scored: Scored) -> Tensor:
        return self.rule(scored)

    def rows_per_sample(self, rollout: Rollout) -> int:
        assert rollout.trajectory is not None, "GRPO needs the trajectory"
        return self.timesteps or len(rollout.trajectory.t)

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        trajectory = rollout.trajectory
        assert trajectory is not None, "GRPO needs the trajectory"
        device = trajectory.x.device
        sample, number = pairs[:, 0], pairs[:, 1]
        stored = len(trajectory.t)
        if self.rows_per_sample(rollout) < stored:
            names = [(*key, *rollout.identity(int(i)), "timesteps") for i in sample]
            number = noise((stored,), names).argsort(dim=1).gather(1, number[:, None]).squeeze(1)
        i, j = sample.to(device), number.to(device)
        return Rows(
            x0=rollout.latents[i],
            x_t=trajectory.x[i, j],
            t=trajectory.t.to(device)[j],
            cond=rollout.cond.select(rollout.prompt_index[sample]),
            advantages=advantages[sample].to(device),
            groups=rollout.prompt_index[sample],
            on_policy=not self.moved,
            guidance=self.spec.guidance,
            x_next=trajectory.x_next[i, j],
            t_next=trajectory.t_next.to(device)[j],
            t_second=rollout.t_second,
            log_prob=trajectory.log_prob[i, j],
        )

    def _step(self, rows: Rows, prediction: Any, process: Any) -> tuple[Tensor, Tensor]:
        spec = self.spec
        assert rows.t_next is not None, "GRPO rows carry the step's end"
        return sde_kernel(spec.name, rows.x_t, prediction, rows.t, rows.t_next, spec.strength, rows.t_second, process)

    def before_step(self, policy: Policy, step: Step) -> None:
        """Every micro-batch is complete in itself."""

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        assert rows.x_next is not None, "GRPO rows carry the stored next state"
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        mean, std = self._step(rows, rows.prediction, policy.process)
        rows.mean, rows.std = mean, std
        return gaussian_log_prob(rows.x_next, mean, std)[:, None]

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        assert rows.log_prob is not None, "GRPO rows carry the sampled log-probability"
        log_prob = phi[:, 0]
        # On policy the ratio is 1 by definition. Taking the log-probability just computed instead of the stored one
        # keeps rounding (other batch sizes, bf16) from using up a clip range of 1e-4.
        sampled = log_prob.detach() if rows.on_policy else rows.log_prob
        ratio = (log_prob.detach() - sampled).exp()
        self._means.add("grpo/clip_fraction", ((ratio - 1).abs() > self.clip).float())
        self._means.add("grpo/ratio", ratio)
        return grpo_loss(log_prob, sampled, rows.advantages, self.clip, self.adv_clip).sum(0)

    def penalty(self, policy: Policy, rows: Rows) -> Tensor | None:
        """`beta * ||mean_theta - mean_ref||^2 / (2 s^2 (-dt))`, mean over latent dimensions."""
        return kl_penalty(self, policy, rows, self._means)

    def reference_of(self, policy: Policy, rows: Rows) -> Prediction:
        return reference_prediction(policy, rows, self.reference)

    def divergence(self, policy: Policy, rows: Rows, reference: Prediction) -> Tensor:
        assert rows.mean is not None and rows.std is not None, "scalars() runs before divergence()"
        mean, _ = self._step(rows, reference, policy.process)
        return ((rows.mean - mean).square() / (2 * rows.std.square())).flatten(1).mean(1)

    def after_step(self, policy: Policy, step: int) -> None:
        self.moved = True

    def after_epoch(self, policy: Policy, step: int) -> None:
        self.moved = False

    def metrics(self) -> dict[str, Tensor]:
        return self._means.take()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """GRPO keeps nothing between epochs."""
