"""DiffusionNFT: negative-aware fine-tuning on the forward process (arXiv 2509.16117).

symbol        name here          meaning
v_theta       theta              prediction (x0, eps, v) with the trained LoRA
v_old         old                prediction with the slowly following snapshot
r             r                  reward probability, clip(A) / (2 A_max) + 1/2
b             strength           guidance strength of the implicit positive and negative policies
L+, L-        phi[:, 0], [:, 1]  self-normalised reconstruction losses of the two policies
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from diffrl.advantages import Std
from diffrl.forward import Prediction
from diffrl.policy import Policy
from diffrl.rollout import Rollout
from diffrl.seeds import noise
from diffrl.trainers.algorithm import AdvantageRule, Decay, Objective, Rows, RunningMeans, Scored, Step

TimestepSampling = Literal["schedule", "uniform", "logit_normal"]
Names = list[tuple[int | str, ...]]  # what each row's random numbers are keyed by


def contrastive_losses(x0: Tensor, x0_theta: Tensor, x0_old: Tensor, b: float) -> Tensor:
    """phi = (L+, L-), (B, 2): x0 losses of the implicit positive and negative policies.

    The paper mixes velocities, `v+ = (1 - b) v_old + b v_theta`, and takes x0+ of it. For given x_t and t, x0 is affine
    in the velocity on every path (x_t - t v, or alpha x_t - sigma v), so mixing the x0 predictions is the same.
    """

    def one(x0_side: Tensor) -> Tensor:
        difference = x0_side - x0
        # The weight is a constant of the step (stop-gradient), at least 1e-5.
        w = difference.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
        return difference.square().flatten(1).mean(1) / w

    sides = (1 - b) * x0_old + b * x0_theta, (1 + b) * x0_old - b * x0_theta
    return torch.stack([one(side) for side in sides], dim=1)


def nft_loss(phi: Tensor, advantages: Tensor, adv_clip: float, b: float) -> Tensor:
    """(B, K) losses `A_max / b * (r L+ + (1 - r) L-)`, affine in the advantages where they are not clipped."""
    r = advantages.clamp(-adv_clip, adv_clip) / (2 * adv_clip) + 0.5
    return adv_clip / b * (r * phi[:, :1] + (1 - r) * phi[:, 1:])


class NFT:
    """The objective of DiffusionNFT on the loop's seams."""

    name = "nft"
    # Directions of phi for whoever wants each reward's gradient: L+ + L- weighs the same for all rewards (r and 1 - r
    # sum to 1), and does not change with theta while old is theta; L+ - L- carries the advantages.
    basis = ((1.0, 1.0), (1.0, -1.0))
    samples_from = "old"
    snapshots: tuple[str, ...] = ("old",)
    reference: str | None = None
    keep_trajectory = False
    whole_groups = False

    def __init__(
        self,
        *,
        beta: float = 1e-4,
        b: float = 1.0,
        adv_clip: float = 5.0,
        timesteps: int | None = None,
        advantage_std: Std = "batch",
        timestep_sampling: TimestepSampling = "schedule",
        levels: int | None = None,
        old: Decay | None = None,
    ) -> None:
        self.beta, self.b, self.adv_clip = beta, b, adv_clip
        self.timesteps, self.timestep_sampling, self.levels = timesteps, timestep_sampling, levels
        self.old = old or Decay(slope=0.001, cap=0.5)
        self.old_is_theta = True  # both LoRAs start equal; then no second forward is needed
        self.rule = AdvantageRule(advantage_std)
        self._means = RunningMeans()

    def advantages(self, scored: Scored) -> Tensor:
        return self.rule(scored)

    def rows_per_sample(self, rollout: Rollout) -> int:
        return self.timesteps or self.levels or len(rollout.schedule) - 1

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        names: Names = [(*key, *rollout.identity(int(i))) for i in pairs[:, 0]]
        count = self.rows_per_sample(rollout)
        t = noise_levels(rollout, names, pairs[:, 1], count, self.timestep_sampling, self.levels)
        return noised_rows(rollout, advantages, pairs, t, names, self.old_is_theta)

    def before_step(self, policy: Policy, step: Step) -> None:
        """Every micro-batch is complete in itself."""

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        theta = rows.prediction
        if self.old_is_theta:
            old = Prediction(*(form.detach() for form in (theta.x0, theta.eps, theta.v)))
        else:
            with torch.no_grad(), policy.using("old"):
                old = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        phi = contrastive_losses(rows.x0, theta.x0, old.x0, self.b)
        self._means.add("nft/drift", (theta.v.detach() - old.v).square().flatten(1).mean(1))
        return phi

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        return nft_loss(phi, rows.advantages, self.adv_clip, self.b).sum(0)

    def penalty(self, policy: Policy, rows: Rows) -> Tensor | None:
        """`beta * mean (v_theta - v_ref)^2`, the reference being the pretrained model."""
        return kl_penalty(self, policy, rows, self._means)

    def reference_of(self, policy: Policy, rows: Rows) -> Prediction:
        return reference_prediction(policy, rows, self.reference)

    def divergence(self, policy: Policy, rows: Rows, reference: Prediction) -> Tensor:
        return velocity_kl(rows.prediction, reference)

    def after_step(self, policy: Policy, step: int) -> None:
        self.old_is_theta = False

    def after_epoch(self, policy: Policy, step: int) -> None:
        decay = self.old(step)
        policy.follow("old", decay)
        self.old_is_theta = decay == 0.0

    def metrics(self) -> dict[str, Tensor]:
        return self._means.take()

    def state_dict(self) -> dict[str, Any]:
        return {"old_is_theta": self.old_is_theta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.old_is_theta = bool(state["old_is_theta"])


def noise_levels(
    rollout: Rollout,
    names: Names,
    number: Tensor,
    count: int,
    sampling: TimestepSampling,
    levels: int | None = None,
) -> Tensor:
    """Noise levels (b,) on the CPU of the rows `number` (b,) of `count`: a shuffled part of the sampling schedule's own
    ("schedule", only the `levels` noisiest if given), or random ones; keyed by `names`, so rows with one name and
    number share their level."""
    if sampling == "schedule":
        usable = rollout.schedule[:-1][:levels]  # the last entry is 0, a clean image
        if count == len(usable):
            return usable[number]
        ranks = noise((len(usable),), [(*name, "timesteps") for name in names]).argsort(dim=1)
        return usable[ranks.gather(1, number[:, None]).squeeze(1)]
    normal = noise((), [(*name, "level", int(j)) for name, j in zip(names, number, strict=True)])
    if sampling == "logit_normal":
        return normal.sigmoid()
    return torch.special.ndtr(normal).clamp(1e-4, 1.0)  # the normal's distribution function is uniform


def noised_rows(rollout: Rollout, advantages: Tensor, pairs: Tensor, t: Tensor, names: Names, on_policy: bool) -> Rows:
    """The images of `pairs` (b, 2), noised to the levels t (b,) with noise keyed by `names` and the row number."""
    sample, number = pairs[:, 0], pairs[:, 1]
    x0 = rollout.latents[sample.to(rollout.latents.device)]
    t = t.to(x0.device)
    eps = noise(tuple(x0.shape[1:]), [(*name, "eps", int(j)) for name, j in zip(names, number, strict=True)])
    eps = eps.to(x0.device)
    return Rows(
        x0=x0,
        x_t=rollout.process.add_noise(x0, eps, t),
        t=t,
        cond=rollout.cond.select(rollout.prompt_index[sample]),
        advantages=advantages[sample].to(x0.device),
        groups=rollout.prompt_index[sample],
        on_policy=on_policy,
        guidance=rollout.guidance,
        pairs=pairs.to(x0.device),
        eps=eps,
    )


def reference_prediction(policy: Policy, rows: Rows, name: str | None) -> Prediction:
    """The prediction of the reference snapshot `name` for the rows, without gradient; None is the pretrained model."""
    with torch.no_grad(), policy.using(name):
        return policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)


def kl_penalty(objective: Objective, policy: Policy, rows: Rows, means: RunningMeans) -> Tensor | None:
    """(b,) `beta * KL` of every row, the KL being logged; None, and no reference forward, where beta is 0."""
    if objective.beta == 0:
        return None
    kl = objective.divergence(policy, rows, objective.reference_of(policy, rows))
    means.add("kl", kl)
    return objective.beta * kl


def velocity_kl(prediction: Prediction | None, reference: Prediction) -> Tensor:
    """(b,) mean over latent dimensions of `(v_theta - v_ref)^2`."""
    assert prediction is not None, "scalars() runs before penalty()"
    return (prediction.v - reference.v).square().flatten(1).mean(1)
