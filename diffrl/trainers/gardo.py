"""GARDO: gated and adaptive regularisation, diversity-aware optimisation, around any objective (arXiv 2512.24138).

symbol      name here            meaning
A_i d_i     shape_advantages     positive advantages grow with the distance to the nearest image of the group
U, k        uncertainty, share   who is penalised: the k share of the samples with the highest U
KL          base.divergence      distance of the penalised rows from the reference
eps_KL, m   reset_kl, _steps     when the trained weights become the reference
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.advantages import Std, weighted_sum
from diffrl.forward import Prediction
from diffrl.policy import Policy
from diffrl.rollout import Rollout
from diffrl.trainers.algorithm import Objective, Rows, RunningMeans, Scored, Step
from diffrl.trainers.gate import Diversity, GateShare, gate_of, nearest_distance, shape_advantages, uncertainty

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
    """An objective whose advantages are shaped by diversity and whose penalty acts on the uncertain samples only.

    Args:
        base: the objective; its loss stays as it is. Its `rule.std`, `beta` and `reference` are set here.
        auxiliary: names of the columns of `Scored.auxiliary`.
        lower: those of them of which a lower score is better.
        beta: weight of the penalty; None keeps the base's. 0: no reference is kept and no forward of it run.
        normalise: "rows": the mean over a step's rows, of which most have none; "gated": over the penalised rows.
        advantage_std: None keeps the base's.
        diversity, gate: see `shape_advantages` and `gate_of`. Gate "all" is the base's own penalty, on every row.
        share, share_range, change, window: see `GateShare`.
        reset_kl, reset_steps: the reference becomes the trained LoRA after a step whose mean KL (of the penalised rows;
            with gate "all" the base's penalty over beta) is above `reset_kl`, or `reset_steps` steps after the last
            reset. Both None: the reference stays the base's.
        measure_every: in every so many-th step the KL of all rows is logged, which costs their reference forwards.
    """

    def __init__(
        self,
        base: Objective,
        *,
        auxiliary: Sequence[str] = (),
        lower: Collection[str] = (),
        beta: float | None = 0.04,
        normalise: Literal["rows", "gated"] = "rows",
        advantage_std: Std | None = "none",
        diversity: Diversity = "group_mean",
        gate: Gate = "batch",
        share: float = 0.1,
        share_range: tuple[float, float] = (0.02, 0.2),
        change: float = 0.1,
        window: int = 20,
        reset_kl: float | None = 1e-4,
        reset_steps: int | None = 100,
        measure_every: int | None = None,
    ) -> None:
        self.base, self.auxiliary, self.gate, self.diversity = base, list(auxiliary), gate, diversity
        self.signs = torch.tensor([-1.0 if name in lower else 1.0 for name in auxiliary])
        self.normalise, self.measure_every = normalise, measure_every
        self.share = GateShare(share, share_range, change, window)
        if advantage_std is not None:
            base.rule.std = advantage_std
        if beta is not None:
            base.beta = beta
        self.reset_kl, self.reset_steps = reset_kl, reset_steps
        self.resets = base.beta != 0 and (reset_kl is not None or reset_steps is not None)
        if self.resets:
            base.reference = REFERENCE
        self.name, self.rule, self.beta, self.reference = base.name, base.rule, base.beta, base.reference
        self.snapshots = (*base.snapshots, REFERENCE) if self.resets else base.snapshots
        self.samples_from, self.keep_trajectory = base.samples_from, base.keep_trajectory
        self.whole_groups = base.whole_groups
        self.judged: Judged | None = None  # of this epoch
        self._epoch: dict[str, float] = {}  # this epoch's numbers, the same on every process
        self._rows = self._forwards = 0  # trained rows, and reference forwards of them, since the last metrics()
        self._reduce: Callable[[Tensor], Tensor] = lambda values: values  # sums over processes
        self._references: Prediction | None = None  # of the step's penalised rows
        self._slots = torch.empty(0)  # (n, T) int64 on the CPU: where a pair's reference is in them, or -1
        self._steps = 0
        self._counters = torch.zeros(2, dtype=torch.int64)  # steps since the last reset, resets; on the policy's device
        self._kl = torch.zeros(2)  # [sum, count] of the step's KL, on the policy's device
        self._weight: float | Tensor = self.beta
        self._means = RunningMeans()

    # ---- once an epoch, on the CPU, on the scores of all processes: every process decides the same

    def advantages(self, scored: Scored) -> Tensor:
        advantages = self.base.advantages(scored)
        self._judge(scored)
        if self.diversity != "off":
            distance = nearest_distance(scored.features, scored.groups)
            self._epoch["gardo/nearest"] = float(distance.mean())
            advantages = shape_advantages(advantages, distance, scored.groups, self.diversity)
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
            self.share.follow(float(above.mean()))
        groups = scored.groups if self.gate == "group" else None
        gate = everyone if self.gate == "all" else gate_of(u, self.share.value, groups)
        self.judged = Judged(u, proxy, scored.auxiliary, gate)
        self._epoch |= {
            "gardo/gate": self.share.value,
            "gardo/uncertainty": self.share.means[-1] if self.share.means else 0.0,
            "gardo/penalised": float(gate.double().mean()),
        }

    # ---- rows and their penalty

    def rows_per_sample(self, rollout: Rollout) -> int:
        return self.base.rows_per_sample(rollout)

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        rows = self.base.rows(rollout, advantages, pairs, key)
        if self._gated:
            rows.slot = self._slots[pairs[:, 0], pairs[:, 1]]
        return rows

    @property
    def _gated(self) -> bool:
        return self.gate != "all" and self.beta != 0

    def before_step(self, policy: Policy, step: Step) -> None:
        """Reference forwards of the step's penalised rows, as many at once as a micro-batch has rows."""
        self.base.before_step(policy, step)
        self._reduce = step.reduce
        self._kl = torch.zeros(2, device=policy.device)
        self._rows += sum(len(part) for part in step.parts)
        if self.beta != 0:  # every process logs the same names, also one that has no penalised row
            self._means.add("gardo/kl_gated", torch.zeros(0, device=policy.device))
        if not self._gated:
            return
        if self._measuring:
            self._means.add("kl", torch.zeros(0, device=policy.device))
        assert self.judged is not None, "advantages() runs before the first step"
        rollout, pairs = step.rollout, torch.cat(list(step.parts))
        chosen = pairs[self.judged.gate[rollout.first + pairs[:, 0]]]
        self._slots = torch.full((len(rollout.member), self.rows_per_sample(rollout)), -1)
        self._slots[chosen[:, 0], chosen[:, 1]] = torch.arange(len(chosen))
        if self.normalise == "gated":
            counts = step.reduce(torch.tensor([len(pairs), len(chosen)], device=policy.device, dtype=torch.float32))
            self._weight = self.beta * counts[0] / counts[1].clamp_min(1)
        predictions = []
        with policy.together():  # processes have unevenly many
            for part in chosen.split(len(step.parts[0])) if len(chosen) else ():
                rows = self.base.rows(rollout, step.advantages, part, step.key)
                predictions.append(self.base.reference_of(policy, rows))
        self._forwards += len(chosen)
        self._references = _joined(predictions)

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        return self.base.scalars(policy, rows)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        return self.base.loss(phi, rows)

    def reference_of(self, policy: Policy, rows: Rows) -> Prediction:
        return self.base.reference_of(policy, rows)

    def divergence(self, policy: Policy, rows: Rows, reference: Prediction) -> Tensor:
        return self.base.divergence(policy, rows, reference)

    def penalty(self, policy: Policy, rows: Rows) -> Tensor | None:
        """(b,) `beta * KL` of the penalised rows and 0 of the others; None if the micro-batch has none."""
        if self.beta == 0:
            return None
        if self.gate == "all":
            penalty = self.base.penalty(policy, rows)
            self._forwards += len(rows.t)
            if penalty is not None:
                self._observe(penalty.detach() / self.beta)
            return penalty
        if self._measuring:
            self._measure(policy, rows)
        assert rows.slot is not None, "the rows were made after before_step()"
        here = (rows.slot >= 0).nonzero().flatten()
        if not len(here):
            return None
        assert self._references is not None
        reference = _selected(self._references, rows.slot[here])
        kl = self.base.divergence(policy, rows.select(here), reference)
        self._observe(kl.detach())
        return kl.new_zeros(len(rows.slot)).index_add(0, here.to(kl.device), self._weight * kl)

    def _observe(self, kl: Tensor) -> None:
        self._means.add("gardo/kl_gated", kl)
        self._kl = self._kl + torch.stack([kl.sum(), kl.new_full((), len(kl))])

    @property
    def _measuring(self) -> bool:
        return self.measure_every is not None and self._steps % self.measure_every == 0

    @torch.no_grad()
    def _measure(self, policy: Policy, rows: Rows) -> None:
        self._means.add("kl", self.base.divergence(policy, rows, self.base.reference_of(policy, rows)))
        self._forwards += len(rows.t)

    # ---- after the update

    def after_step(self, policy: Policy, step: int) -> None:
        self.base.after_step(policy, step)
        self._steps = step
        self._references = None
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
            total = self._reduce(self._kl)
            due = due | (total[0] / total[1].clamp_min(1) > self.reset_kl)
        policy.follow(REFERENCE, 1 - due.float())
        self._counters = torch.stack([torch.where(due, 0, since), self._counters[1] + due])

    def after_epoch(self, policy: Policy, step: int) -> None:
        self.base.after_epoch(policy, step)

    def metrics(self) -> dict[str, Tensor]:
        sums = {**self.base.metrics(), **self._means.take()}
        device = self._kl.device
        numbers = {name: torch.tensor([value, 1.0], device=device) for name, value in self._epoch.items()}
        numbers["gardo/resets"] = torch.stack([self._counters[1].to(device).float(), torch.ones((), device=device)])
        if self.beta != 0:
            saved = [float(self._rows - self._forwards), float(self._rows)]
            numbers["gardo/forwards_saved"] = torch.tensor(saved, device=device)
        self._rows = self._forwards = 0
        return sums | numbers

    def exhibit(
        self, policy: Policy, rollout: Rollout, reduce: Callable[[Tensor], Tensor], count: int = 8, side: int = 256
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """The epoch's samples with the highest U, highest first: images (count, 3, h, w) on the CPU, and what is known.

        Every process decodes those that it made, `reduce` puts them together. Images larger than `side` are reduced.
        Each dict: prompt, member, uncertainty, penalised, scores {name: score}, the proxy first (None: not applicable).
        """
        judged = self.judged
        assert judged is not None, "there are no auxiliary rewards"
        chosen = judged.u.nan_to_num(-2.0).argsort(descending=True, stable=True)[:count]
        local = chosen - rollout.first
        here = (local >= 0) & (local < len(rollout.member))
        images = policy.decode(rollout.latents[local.clamp(0, len(rollout.member) - 1).to(rollout.latents.device)])
        if max(images.shape[-2:]) > side:
            images = F.interpolate(images, size=(side, side), mode="area")
        images = reduce(images * here.to(images.device)[:, None, None, None]).cpu()
        group, rows = rollout.total // len(rollout.prompts), []
        for i in chosen.tolist():
            scores = torch.cat([judged.proxy[i : i + 1], judged.auxiliary[i]]).tolist()
            rows.append(
                {
                    "prompt": rollout.prompts[i // group].text,
                    "member": i % group,
                    "uncertainty": _or_none(float(judged.u[i])),
                    "penalised": bool(judged.gate[i]),
                    "scores": dict(zip(["proxy", *self.auxiliary], map(_or_none, scores), strict=True)),
                }
            )
        return images, rows

    def state_dict(self) -> dict[str, Any]:
        since, resets = self._counters.tolist()
        return {
            "base": self.base.state_dict(),
            "share": self.share.value,
            "window": list(self.share.means),
            "steps": self._steps,
            "since_reset": since,
            "resets": resets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self.share.value, self.share.means = float(state["share"]), [float(mean) for mean in state["window"]]
        self._steps = int(state["steps"])
        self._counters = torch.tensor([int(state["since_reset"]), int(state["resets"])])


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _joined(parts: Sequence[Prediction]) -> Prediction | None:
    if not parts:
        return None
    return Prediction(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x0", "eps", "v")))


def _selected(prediction: Prediction, index: Tensor) -> Prediction:
    index = index.to(prediction.v.device)
    return Prediction(prediction.x0[index], prediction.eps[index], prediction.v[index])
