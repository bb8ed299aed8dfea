"""GARDO: gated and adaptive regularisation, diversity-aware optimisation, around any objective (arXiv 2512.24138).

symbol      name here            meaning
A_i d_i     shape_advantages     positive advantages grow with the distance to the nearest image of the group
U, k        uncertainty, share   who is penalised: the k share of the samples with the highest U
KL          base.penalty         divergence of the penalised rows from the reference
eps_KL, m   reset_kl, _counters  when the trained weights become the reference
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from diffrl.advantages import weighted_sum
from diffrl.config import Config
from diffrl.methods.gardo import GardoSection
from diffrl.methods.gardo.gate import GateShare, gate_of, nearest_distance, shape_advantages, uncertainty
from diffrl.methods.gardo.references import Gated
from diffrl.objectives.objective import Objective, Scored, Step
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy
from diffrl.rollout import Rollout

REFERENCE = "reference"  # the snapshot that a reset renews
Gate = Literal["batch", "group", "all"]


@dataclass(frozen=True)
class Judged:
    """What the gate saw of the current epoch, over all processes: u (N,), proxy (N,), auxiliary (N, A), gate (N,)."""

    u: Tensor
    proxy: Tensor
    auxiliary: Tensor
    gate: Tensor


class Gardo:
    """An `Objective` whose advantages are shaped by diversity and whose penalty acts on the uncertain samples only.

    All that it does not define itself is the base's (`__getattr__`): its rows, its loss, its snapshots, and whatever an
    objective of tomorrow has.

    Args:
        base: the objective; its loss stays as it is. Its `rule.std` and its penalty are set here.
        auxiliary: names of the columns of `Scored.auxiliary`.
        lower: those of them of which a lower score is better.
        beta: weight of the penalty; None keeps the base's. 0: no reference is kept and no forward of it run.
        advantage_std: None keeps the base's.
        diversity, gate: see `shape_advantages` and `gate_of`. Gate "all" is the base's own penalty, on every row.
        share, share_range, window, window_full: see `GateShare`.
        reset_kl, reset_steps: the reference becomes the trained LoRA after a step whose mean KL (of the penalised rows;
            with gate "all" the base's penalty over beta) is above `reset_kl`, or `reset_steps` steps after the last
            reset. Both None: the reference stays the base's. normalise: see `Gated`.
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
        self.base, self.auxiliary, self.gate, self.diversity = base, keys.auxiliary, keys.gate, keys.diversity
        self.signs = torch.tensor([-1.0 if name in lower else 1.0 for name in keys.auxiliary])
        self.gate_share = GateShare(keys.share, keys.share_range, keys.window, keys.window_full)
        if keys.advantage_std is not None:
            base.rule.std = keys.advantage_std
        if keys.beta is not None:
            base.penalty.beta = keys.beta
        self.reset_kl, self.reset_steps = reset_kl, reset_steps
        self.resets = base.penalty.beta != 0 and (reset_kl is not None or reset_steps is not None)
        if self.resets:
            base.penalty.reference = REFERENCE
        self.snapshots = (*base.snapshots, REFERENCE) if self.resets else base.snapshots
        how: dict[str, Any] = {"gated": keys.gate != "all", "normalise": keys.normalise}
        self.penalty = self.gated = Gated(base, **how)
        self.gated.share = 1.0 if keys.gate == "all" else keys.share
        self.judged: Judged | None = None  # of this epoch
        self._epoch: dict[str, float] = {}  # this epoch's numbers, the same on every process
        self._reduce: Callable[[Tensor], Tensor] = lambda values: values  # sums over processes
        self._counters = torch.zeros(2, dtype=torch.int64)  # steps since the last reset, resets; on the policy's device

    @classmethod
    def of(cls, section: GardoSection, base: Objective, config: Config, lower: Collection[str]) -> Gardo:
        """With the reset's two thresholds."""
        return cls(base, section, lower=lower, reset_kl=section.reset_kl(config), reset_steps=section.reset.steps)

    def __getattr__(self, name: str) -> Any:
        """Asked for what is not Gardo's own."""
        if name == "base":  # before it is set: a copy in the making
            raise AttributeError(name)
        return getattr(self.base, name)

    # ---- once an epoch, on the CPU, on the scores of all processes: every process decides the same

    def advantages(self, scored: Scored) -> Tensor:
        advantages = self.base.advantages(scored)
        self._judge(scored)
        if self.diversity != "off":
            distance = nearest_distance(scored.features, scored.groups)
            self._epoch["gardo/nearest"] = float(distance.mean())
            flat = advantages.flatten(1)  # of (N, T, K), too: every row of a sample by the same distance
            advantages = shape_advantages(flat, distance, scored.groups, self.diversity).view_as(advantages)
        return advantages

    def _judge(self, scored: Scored) -> None:
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
        gate = everyone if self.gate == "all" else gate_of(u, self.gate_share.value, groups)
        self.judged = Judged(u, proxy, scored.auxiliary, gate)
        self._epoch |= {
            "gardo/gate": self.gate_share.value,
            "gardo/uncertainty": self.gate_share.means[-1] if self.gate_share.means else 0.0,
            "gardo/penalised": float(gate.double().mean()),
        }

    # ---- the base's rows, loss and snapshots, and a penalty of the judged samples

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        return self.gated.mark(self.base.rows(rollout, advantages, pairs, key), pairs)

    def before_step(self, policy: Policy, step: Step) -> None:
        self.base.before_step(policy, step)
        self._reduce = step.reduce
        self.gated.before_step(policy, step, None if self.judged is None else self.judged.gate)

    def after_step(self, policy: Policy, step: int) -> None:
        self.base.after_step(policy, step)
        self.gated.after_step()
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
        policy.follow(REFERENCE, 1 - due.float())
        self._counters = torch.stack([torch.where(due, 0, since), self._counters[1] + due])

    def metrics(self) -> dict[str, Tensor]:
        sums = self.base.metrics()
        device = self.gated.kl.device
        numbers = {name: torch.tensor([value, 1.0], device=device) for name, value in self._epoch.items()}
        numbers["gardo/resets"] = torch.stack([self._counters[1].to(device).float(), torch.ones((), device=device)])
        if self.gated.beta != 0:
            numbers["gardo/forwards_saved"] = self.gated.saved()
        return sums | numbers

    def state_dict(self) -> dict[str, Any]:
        since, resets = self._counters.tolist()
        return {
            "base": self.base.state_dict(),
            "share": self.gate_share.value,
            "window": list(self.gate_share.means),
            "since_reset": since,
            "resets": resets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self.gate_share.value, self.gate_share.means = float(state["share"]), [float(mean) for mean in state["window"]]
        self._counters = torch.tensor([int(state["since_reset"]), int(state["resets"])])
