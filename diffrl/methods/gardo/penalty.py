"""GARDO: gated and adaptive regularisation, diversity-aware optimisation, around any objective (arXiv 2512.24138).

symbol      name here            meaning
A_i d_i     shape_advantages     positive advantages grow with the distance to the nearest image of the group
U, k        uncertainty, share   who is penalised: the k share of the samples with the highest U
KL          gated                divergence of the penalised rows from the reference
eps_KL, m   reset_kl, _counters  when the trained weights become the reference
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffrl.advantages import weighted_sum
from diffrl.config import Config
from diffrl.methods.gardo import GardoSection
from diffrl.methods.gardo.gate import GateShare, gate_of, nearest_distance, shape_advantages, uncertainty
from diffrl.methods.gardo.references import GatedReferences
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.objective import Objective, OptimiserStep
from diffrl.objectives.penalty import Penalty
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy

REFERENCE = "reference"  # the snapshot that a reset renews


@dataclass(frozen=True)
class Judged:
    """What the gate saw of the current epoch, over all processes: u (N,), proxy (N,), auxiliary (N, A), gate (N,)."""

    u: Tensor
    proxy: Tensor
    auxiliary: Tensor
    gate: Tensor


class Gardo(Penalty):
    """Takes the place of an objective's penalty and acts on the uncertain samples only; shapes advantages by diversity.

    Args:
        base: the objective; its loss stays as it is. Its rule's std, its penalties and its transforms are set here.
        keys: `auxiliary`: names of the columns of `ScoredBatch.auxiliary`. `beta`: weight of the penalty; None keeps
            the base's. 0: no reference is kept and no forward of it run. `advantage_std`: None keeps the base's.
            `diversity`, `gate`: see `shape_advantages` and `gate_of`; gate "all" is the base's own penalty, on every
            row. `share`: see `GateShare`. `normalise`: see `GatedReferences`.
        lower: names of auxiliary rewards of which a lower score is better.
        reset_kl, reset_steps: the reference becomes the trained LoRA after a step whose mean KL (of the penalised rows;
            with gate "all" the base's penalty over beta) is above `reset_kl`, or `reset_steps` steps after the last
            reset. Both None: the reference stays the base's.
    """

    def __init__(
        self,
        base: Objective,
        keys: GardoSection | None = None,
        *,
        lower: Collection[str] = (),
        reset_kl: float | None = None,
        reset_steps: int | None = None,
        **values: Any,
    ) -> None:
        keys = GardoSection.of(keys, values)
        self.auxiliary, self.gate, self.diversity = keys.auxiliary, keys.gate, keys.diversity
        self.signs = torch.tensor([-1.0 if name in lower else 1.0 for name in keys.auxiliary])
        self.gate_share = GateShare(keys.share)
        if keys.advantage_std is not None:
            base.rule = replace(base.rule, std=keys.advantage_std)
        if keys.beta is not None:
            base.penalty.beta = keys.beta
        super().__init__(base, base.penalty.beta, base.penalty.guidance)
        self.reset_kl, self.reset_steps = reset_kl, reset_steps
        self.resets = self.beta != 0 and (reset_kl is not None or reset_steps is not None)
        if self.resets:
            base.penalty.reference = self.reference = REFERENCE
            base.snapshots = (*base.snapshots, REFERENCE)
        if keys.gate != "all":
            self.share, self.kept = keys.share, self.gate_share.limits[1]
        self.gated = GatedReferences(base, gated=keys.gate != "all", normalise=keys.normalise)
        base.penalties = [self, *base.penalties[1:]]
        if keys.diversity != "off":
            base.transforms = [*base.transforms, self.diverse]
        self.judged: Judged | None = None  # of this epoch
        self._epoch: dict[str, float] = {}  # this epoch's numbers, the same on every process
        self._reduce: Callable[[Tensor], Tensor] = lambda values: values  # sums over processes
        self._counters = torch.zeros(2, dtype=torch.int64)  # steps since the last reset, resets; on the policy's device

    @classmethod
    def of(cls, section: GardoSection, base: Objective, config: Config, lower: Collection[str]) -> Gardo:
        """With the reset's two thresholds."""
        return cls(base, section, lower=lower, reset_kl=section.reset_kl(config), reset_steps=section.reset.steps)

    # ---- once an epoch, on the CPU, on the scores of all processes: every process decides the same

    def see_epoch(self, scored: ScoredBatch) -> None:
        proxy = weighted_sum(scored.scores, scored.weights)[:, 0]
        everyone = torch.ones(len(proxy), dtype=torch.bool)
        if not self.auxiliary:
            assert self.gate == "all", "a gate needs auxiliary rewards"
            self.judged = None
            return
        u = uncertainty(proxy, scored.auxiliary * self.signs)
        above = u[u >= 0]
        if len(above):
            self.gate_share.follow(float(above.mean()))
        groups = scored.groups if self.gate == "group" else None
        gate = everyone if self.gate == "all" else gate_of(u, self.gate_share.value, groups, scored.names)
        self.judged = Judged(u, proxy, scored.auxiliary, gate)
        self._epoch |= {
            "gardo/gate": self.gate_share.value,
            "gardo/uncertainty": self.gate_share.means[-1] if self.gate_share.means else 0.0,
            "gardo/penalised": float(gate.double().mean()),
            "gardo/suspected": float((u > 0).double().mean()),
        }

    def diverse(self, advantages: Tensor, scored: ScoredBatch) -> Tensor:
        """Advantages (N, K) or (N, T, K), shaped by each sample's distance: every row of it by the same."""
        distance = nearest_distance(scored.features, scored.groups)
        self._epoch["gardo/nearest"] = float(distance.mean())
        shaped = shape_advantages(advantages.flatten(1), distance, scored.groups, self.diversity)
        return shaped.view_as(advantages)

    # ---- the penalty of the judged samples, and its reference

    def __call__(self, policy: Policy, rows: Rows) -> Tensor | None:
        return self.gated(policy, rows)

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        self._reduce = step.reduce
        self.gated.judge(policy, step, None if self.judged is None else self.judged.gate)

    def after_step(self, policy: Policy, step: int) -> None:
        self.gated.forget()
        if self.resets:
            self._reset(policy)

    def _reset(self, policy: Policy) -> None:
        """reference <- theta if it is due. Decided on the device: the host goes on without knowing."""
        self._counters = self._counters.to(policy.device)
        since = self._counters[0] + 1
        due = torch.zeros((), dtype=torch.bool, device=policy.device)
        if self.reset_steps is not None:
            due = due | (since >= self.reset_steps)
        if self.reset_kl is not None:
            total = self._reduce(self.gated.kl)
            due = due | (total[0] / total[1].clamp_min(1) > self.reset_kl)
        policy.ema_update(REFERENCE, 1 - due.float())
        self._counters = torch.stack([torch.where(due, 0, since), self._counters[1] + due])

    def metrics(self) -> dict[str, Tensor]:
        device = self.gated.kl.device
        numbers = {name: torch.tensor([value, 1.0], device=device) for name, value in self._epoch.items()}
        numbers["gardo/resets"] = torch.stack([self._counters[1].to(device).float(), torch.ones((), device=device)])
        if self.gated.beta != 0:
            numbers["gardo/forwards_saved"] = self.gated.saved()
        return numbers

    def state_dict(self) -> dict[str, Any]:
        since, resets = self._counters.tolist()
        return {
            "share": self.gate_share.value,
            "window": list(self.gate_share.means),
            "since_reset": since,
            "resets": resets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gate_share.value, self.gate_share.means = float(state["share"]), [float(mean) for mean in state["window"]]
        self._counters = torch.tensor([int(state["since_reset"]), int(state["resets"])])
