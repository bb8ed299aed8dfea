"""DGPO: direct group preference optimisation (arXiv 2510.08425): the good of a group against its bad, with weights |A|.

symbol   name here      meaning
d        d              e_theta - e_ref, e being mean (v_. - v)^2; the reference is frozen, with the guidance that the
                        penalty's has (`anchor_guidance`)
A        advantages     they sum to 0 in a group, so what is common to its d changes nothing
S        preference     b / G sum_i A_i d_i: how wrong the group still is
rho      exp(-moved)    exp(e_old - e_theta); A > 0 with rho > 1 + c, or A < 0 with rho < 1 - c: the row is stopped:
                        e_i has no gradient. Its penalty stays, as in all released configurations (`clip_kl` False):
                        a row that has gone too far is what the reference should pull back

    L = -log sigma(-S),      dL/de_i = b / G sigma(S) A_i

As in the code the step is divided by b: with S measured before it, the loss is the mean of sigma(S) A_i e_i over rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import logsigmoid

from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.dgpo import DGPOSection
from diffrl.methods.shared.coupling import GroupLoss, error_under, grouped_noising, own_error
from diffrl.methods.shared.sections import SLOW
from diffrl.objectives.objective import Cost, Objective, OptimiserStep
from diffrl.objectives.penalty import Penalty
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy


def group_slopes(d: Tensor, advantages: Tensor, b: float) -> tuple[Tensor, Tensor]:
    """sigma(S) A (P, G, T, K), and S (P, T, K), of d (P, G, T) and advantages (P, G, K)."""
    preference = b * (advantages[:, :, None] * d[..., None]).mean(1)
    return preference.sigmoid()[:, None] * advantages[:, :, None], preference


def stopped(moved: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """(P, G, T, K): has a row gone further than the clip to where A pushes it? `moved` (P, G, T): e_theta - e_old."""
    rho, a = (-moved[..., None]).exp(), advantages[:, :, None]
    return ((a > 0) & (rho > 1 + clip)) | ((a < 0) & (rho < 1 - clip))


class DGPO(Objective):
    """A group shares a row's level and noise. Rollouts come from theta; after the step `sample_old` from "old"."""

    whole_groups = True

    def __init__(self, keys: DGPOSection | None = None, **values: Any) -> None:
        keys = DGPOSection.of(keys, values)
        noising = grouped_noising(keys)
        super().__init__(beta=keys.beta, advantage_std=keys.advantage_std, noising=noising, decays={"old": SLOW})
        self.penalties = [Penalty(self, keys.beta, keys.anchor_guidance)]
        self.guidance = keys.anchor_guidance
        self.b, self.clip, self.sample_old = keys.b, keys.clip, keys.sample_old
        self.coupling = GroupLoss(self._slopes, count=2)

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        # Theta, measured, and old where anything is compared with it; the reference has a guidance of its own.
        guided = [(1.0, self.guidance_scale if self.guidance is None else self.guidance)]
        return Cost(forwards=1 + (self.clip is not None), guided=guided)

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        self.coupling.measure(self, policy, step, lambda rows: self._moved(policy, rows))

    def _moved(self, policy: Policy, rows: Rows) -> tuple[Tensor, Tensor]:
        """e_theta less that of the reference, and of old where there is a clip."""
        theta = error_under(policy, rows, "default")
        old = error_under(policy, rows, "old") if not self.on_policy and self.clip else theta
        return theta - error_under(policy, rows, None, self.guidance), theta - old

    def _slopes(self, measured: Tensor, advantages: Tensor, mine: Tensor) -> Tensor:
        slopes, preference = group_slopes(measured[0], advantages, self.b)
        known, gate = (advantages[:, :, None] != 0) & mine[:, None, None, None], preference.sigmoid()
        for name, values in (("loss", -logsigmoid(-preference)), ("gate", gate), ("gate_spread", (gate - 0.5).abs())):
            self.means.add(f"dgpo/{name}", values, known.any(1).expand_as(values))
        stops = stopped(measured[1], advantages, self.clip or float("inf"))
        self.means.add("dgpo/stopped", stops.float(), known.expand_as(stops))
        return slopes * ~stops

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        return own_error(policy, rows)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        return self.coupling.loss(phi, rows)

    def after_epoch(self, policy: Policy, step: int) -> None:
        super().after_epoch(policy, step)
        if self.sample_old is not None and step >= self.sample_old:
            self.samples_from = "old"

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"samples_from": self.samples_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.samples_from = str(state["samples_from"])
