"""The seams between the one loop and the methods.

The loop (`diffrl.run.loop`) is the same for every method:

    scores     = score(rewards, rollout)                   # (N, K), NaN: does not apply
    advantages = objective.shaped(scored)                  # (N, columns), by its `rule`
    for each optimiser step:
        objective.before_step(policy, step)                # what needs more than one micro-batch
        for each micro-batch of (sample, row number) pairs:
            rows    = objective.batch(rollout, advantages, pairs, key)
            phi     = objective.scalars(policy, rows)      # (b, m), differentiable
            losses  = objective.loss(phi, rows)            # (K,), a cheap function of phi
            penalty = penalties(objective, policy, rows)   # (b,) or None, kept outside any balancing
        ... one update by `Gradients` ..., objective.after_step(policy, steps)
    objective.after_epoch(policy, steps)

**An objective** is a class under `Objective`, which has defaults for all but `scalars` and `loss`: rows are the images
noised again (`noising`), the penalty is `beta` times the divergence from a reference, snapshots follow by their
`decays`, and no state is kept beyond whether theta has left "old". `methods/nft/objective.py` is the shortest example.

**What may be replaced alone**
- `rule`: from scores to advantages. MARBLE gives one with other columns, GARDO with another standard deviation. Where a
  reward does not apply its advantage is 0; `rows.known` says where, for a loss in which 0 is not "nothing", and MARBLE.
- `advantages`: (N, columns), or (N, T, columns) if rows of one image differ; `rows` picks with `row_advantages`.
- `noising`, or `rows` itself: where rows come from (a stored trajectory, a continuation, other images).
- `pairs`: which rows are trained at all (a pair of a group, an edge of a tree); `selects` says that some are not.
- `credit`: which plan the rollout follows, several scored views of a sample, and (N, T, columns) advantages of them.
- `before_step`: called once for each optimiser step with all its pairs, on every process: targets over groups.
- `learn`, `warmup`, `tensors`: for what it learns itself beside the LoRA (AC-Flow's critic).
- `penalties`: each a `Penalty`: its reference (`anchor`), its `divergence`, its `strength` by row. GARDO puts one in
  the place of the first that acts on few rows; another regulariser is another subclass.
- `transforms`: of advantages, after `advantages`. GARDO's diversity is one.
- `Gradients`: how K losses become one gradient: their sum, or balanced (MARBLE).

Symbols: n local samples, N samples of all processes, T training rows per sample, b rows of a micro-batch, K rewards,
m scalars per row; latents (b, C, h, w).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from diffrl.advantages import Std
from diffrl.config import Config
from diffrl.config.base import Section
from diffrl.config.methods import Decay
from diffrl.config.sections import Rollout as Drawn
from diffrl.objectives.advantages import AdvantageRule, AdvantageTransform, ScoredBatch
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.penalty import Penalty
from diffrl.objectives.rows import Rows
from diffrl.objectives.running_stats import RunningMeans
from diffrl.policy import Policy
from diffrl.rewards.protocol import Reward
from diffrl.rollout import Rollout
from diffrl.samplers import SamplerSpec

if TYPE_CHECKING:
    from diffrl.objectives.credit import Credit
    from diffrl.objectives.noising import Noising


@dataclass(frozen=True)
class OptimiserStep:
    """One optimiser step's share of this process, before its first backward pass.

    `parts` are the micro-batches, pairs (b, 2) of (local sample, row number); `objective.rows(rollout, advantages,
    part, key)` makes the rows of one. `reduce` sums a tensor over processes: every process must call it equally often.
    """

    rollout: Rollout
    advantages: Tensor  # (n, K) or (n, T, K)
    parts: Sequence[Tensor]
    key: tuple[int | str, ...]
    reduce: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cost:
    """What a method takes beside a forward and a backward of each row, its penalties aside; for estimates.

    share: of a rollout's rows that `pairs` leaves. forwards: without gradient, for each trained row. waiting: one of
    them comes while a micro-batch's graph waits for its backward pass. guided: more of them, each (for each trained
    row, its guidance). loras: that are read once and never change, beside the snapshots.
    """

    share: float = 1.0
    forwards: float = 0.0
    waiting: bool = False
    guided: Sequence[tuple[float, float]] = ()
    loras: int = 0


@dataclass(frozen=True)
class BuildContext:
    """What a run hands to its objective's `of`, beside the objective's section."""

    config: Config
    spec: SamplerSpec
    rewards: Mapping[str, Reward] = field(default_factory=dict)  # those that are optimised
    credit: Credit | None = None


class Objective(ABC):
    """What turns a rollout into a loss; a method defines `scalars` and `loss`, and of the rest what differs.

    Args:
        beta: weight of the penalty; 0: no reference forward.
        advantage_std: what advantages are divided by, see `AdvantageRule`.
        noising: how images become rows.
        decays: how each snapshot that the method keeps follows the trained LoRA after an epoch.
    """

    section: type[Section]  # its keys and facts; shipped ones name the class (`Method.trainer`) instead
    samples_from = "default"  # the snapshot that rollouts are drawn with
    keep_trajectory: bool | Literal["path"] = False  # the stochastic steps, or all of them
    whole_groups = False  # True: the members of a prompt group stay together in an optimiser step
    # m directions (m,) of phi for combiners of the rewards' gradients, if there are better ones than its columns: the
    # slopes along the first are the same for all rewards, and its gradient is 0 on policy. See `gradients.Passes`.
    basis: Sequence[Sequence[float]] | None = None
    selects = False  # True: `pairs` leaves rows out, or orders them
    guidance_scale = 1.0  # classifier-free, of the trained rows
    credit: Credit | None = None  # credit over the steps: what else the rollout draws, and row advantages of it
    warmup = 0  # epochs of the untrained model's images that `learn` sees before training

    def __init__(
        self,
        *,
        beta: float = 0.0,
        advantage_std: Std = "group",
        noising: Noising | None = None,
        decays: Mapping[str, Decay] | None = None,
    ) -> None:
        self.rule = AdvantageRule(advantage_std)
        self.transforms: list[AdvantageTransform] = []  # of advantages, once they are made
        # The first holds to the reference, and may be gated; what follows stays as it is.
        self.penalties: list[Penalty] = [Penalty(self, beta)]
        if noising is not None:
            self.noising = noising
        self.decays = dict(decays or {})
        self.snapshots: tuple[str, ...] = tuple(self.decays)
        # Is theta still what it is compared with: "old", or the LoRA that sampled? All LoRAs start equal.
        self.on_policy = True
        self.means = RunningMeans()
        self.known: Tensor | None = None  # (N, columns) bool of the epoch: where a reward applies

    @functools.cached_property
    def noising(self) -> Noising:
        """The default; a method whose rows are its rollout's own steps has none."""
        from diffrl.objectives.noising import Noising

        return Noising()

    @property
    def penalty(self) -> Penalty:
        """The first, which holds the objective to its reference."""
        return self.penalties[0]

    @classmethod
    def of(cls, section: Section, given: BuildContext) -> Objective:
        """Built from its section of a config; what else a method needs of the run, it takes from `given` here."""
        return cls(section)  # type: ignore[arg-type, call-arg]

    def prepare(self, policy: Policy) -> None:  # noqa: B027
        """Called once, before the snapshots are added: for what else it reads into the policy."""

    def advantages(self, scored: ScoredBatch) -> Tensor:
        """(N, columns) or (N, T, columns): what `rule` says."""
        return self.rule(scored)

    def shaped(self, scored: ScoredBatch) -> Tensor:
        """The `advantages` that are trained: the penalties have seen the epoch, and the transforms are applied."""
        for penalty in self.penalties:
            penalty.see_epoch(scored)
        self.known = self.rule.known(scored)
        advantages = self.advantages(scored)
        for transform in self.transforms:
            advantages = transform(advantages, scored)
        return advantages

    def rows_per_sample(self, rollout: Rollout) -> int:
        """T: training rows for each sample."""
        return self.noising.count(rollout)

    def pairs(self, rollout: Rollout, advantages: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """The (local sample, row number) pairs (rows, 2) that are trained of an optimiser step's `samples`.

        What is left out is never forwarded; the step's mean is over the others.
        """
        return sample_pairs(samples, self.rows_per_sample(rollout))

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        """Of an epoch of this section with so many optimiser steps; `split`: micro-batches split groups."""
        return Cost(forwards=int("old" in self.snapshots), waiting="old" in self.snapshots)

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        """The micro-batch for `pairs` (b, 2) of (local sample, row number in 0 .. T-1).

        `advantages` (n, K) or (n, T, K) are those of the local samples; `key` seeds what is random in a row.
        """
        return self.noising.rows(rollout, advantages, pairs, key, self.on_policy)

    def batch(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> Rows:
        """`rows`, which say where a reward does not apply, if there are such images in the epoch."""
        rows = self.rows(rollout, advantages, pairs, key)
        if self.known is not None and not bool(self.known.all()):
            rows.known = self.known[rollout.first + pairs[:, 0]].to(rows.t.device, non_blocking=True)
        return rows

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:  # noqa: B027
        """Called before the first backward pass of an optimiser step: for what needs more than one micro-batch."""

    def learn(self, policy: Policy, step: OptimiserStep) -> None:  # noqa: B027
        """What an objective learns beside the LoRA (a critic), of an optimiser step's images; before training."""

    @abstractmethod
    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, m): differentiable per-row scalars of the trained LoRA, whose prediction is left in `rows`."""

    @abstractmethod
    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """(K,) losses, summed over the rows: a cheap function of `phi` and `rows.advantages`."""

    def after_step(self, policy: Policy, step: int) -> None:
        """Called after every optimiser step with the number of steps so far."""
        self.on_policy = False

    def after_epoch(self, policy: Policy, step: int) -> None:
        """Called after the last optimiser step of an epoch: snapshots follow; a decay of 0 is a copy."""
        for name, decay in self.decays.items():
            policy.ema_update(name, decay(step))
        self.on_policy = "old" not in self.decays or self.decays["old"](step) == 0.0

    def metrics(self) -> dict[str, Tensor]:
        """Sums since the last call, as {name: tensor [sum, count]}; they stay on the device."""
        return self.means.take()

    def state_dict(self) -> dict[str, Any]:
        """What shapes the future beside the snapshots, as JSON takes it."""
        return {"old_is_theta": self.on_policy} if "old" in self.decays else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.on_policy = bool(state["old_is_theta"]) if "old" in self.decays else True

    def tensors(self) -> dict[str, Tensor]:
        """What it has learned beside the LoRA, on the CPU, for the checkpoint."""
        return {}

    def load_tensors(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """The inverse of `tensors`."""
